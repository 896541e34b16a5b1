from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import grpc
import pytest

from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import worker_pb2
from tests.cli import scripted
from tests.cli.conftest import Paceline
from tests.cli.scripted import ScriptedCoordinator

Serve = Callable[[ScriptedCoordinator], str]


def test_a_pipe_gets_the_text_and_nothing_else(paceline: Paceline, address: str) -> None:
    done = paceline("generate", "--address", address, "--prompt", "Why?")
    assert done.exit_code == 0
    assert done.stdout == scripted.TEXT + "\n"
    assert done.stderr == ""


def test_json_is_one_object_with_everything(paceline: Paceline, address: str) -> None:
    done = paceline("generate", "--address", address, "--prompt", "Why?", "--json")
    assert done.exit_code == 0
    assert done.stderr == ""
    answer = json.loads(done.stdout)
    speculation = answer.pop("speculation")
    assert answer == {
        "text": scripted.TEXT,
        "token_ids": [11, 12, 13, 14, 15],
        "origins": ["accepted_draft", "accepted_draft", "residual", "bonus", "target"],
        "prompt_token_ids": [1, 2, 3],
        "finish_reason": "length",
        "usage": {"prompt_tokens": 3, "completion_tokens": 5},
        "seed": 2**64 - 1,
        "gamma": 4,
        "adaptive_gamma": False,
        "verification": "coupled",
        "sampling": {"temperature": 0.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        "max_tokens": 5,
        "request_id": "request-7",
        "trace_id": "",
    }
    first, second = speculation.pop("per_round")
    assert speculation == {
        "rounds": 2,
        "proposed": 4,
        "tested": 3,
        "accepted": 2,
        "emitted": 5,
        "alpha": 2 / 3,
        "tokens_per_round": 2.5,
        "degraded_rounds": 1,
    }
    assert (first["index"], first["q_bytes"], first["degraded"], first["emitted"]) == (0, 2**33, False, 3)
    assert second["degraded"] is True
    assert first["target"] == {
        "queue_ms": 20.0,
        "forward_ms": 58.0,
        "service_ms": 78.0,
        "forward_tokens": 5,
        "worker_id": "t-0",
        "batch_size": 3,
        "reused_tokens": 2,
        "pass_tokens": 9,
    }


@pytest.mark.parametrize(("reason", "name"), [(pb.FINISH_REASON_EOS, "eos"), (pb.FINISH_REASON_STOP, "stop")])
def test_json_names_the_finish_reason(paceline: Paceline, serve: Serve, reason: pb.FinishReason, name: str) -> None:
    ending = pb.GenerateResponse(result=scripted.result(finish_reason=reason))
    done = paceline("generate", "--address", serve(ScriptedCoordinator([ending])), "--prompt", "Why?", "--json")
    answer = json.loads(done.stdout)
    assert (answer["finish_reason"], answer["text"], answer["token_ids"]) == (name, "", [])


def test_every_option_reaches_the_request(paceline: Paceline, coordinator: ScriptedCoordinator, address: str) -> None:
    options = "--max-tokens 7 --temperature 0 --top-k 0 --top-p 0.5 --min-p 0 --seed 0 --gamma 0 --ignore-eos"
    options += " --verification token"
    stops = ["--stop", "\n\n", "--stop", "END", "--stop-token-id", "2", "--stop-token-id", "5"]
    done = paceline("generate", "--address", address, "--prompt", " raw ", *options.split(), *stops, "--deadline", "30")
    assert done.exit_code == 0, done.output
    request = coordinator.requests[0]
    assert request.text == " raw "
    assert (request.max_tokens, request.seed, request.gamma) == (7, 0, 0)
    assert request.verification == worker_pb2.VERIFICATION_TOKEN
    assert all(request.HasField(name) for name in ("max_tokens", "seed", "gamma"))  # type: ignore[arg-type]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0, 0, 0.5, 0)
    assert all(sampling.HasField(name) for name in ("temperature", "top_k", "top_p", "min_p"))  # type: ignore[arg-type]
    assert (list(request.stop.strings), list(request.stop.token_ids)) == (["\n\n", "END"], [2, 5])
    assert request.stop.ignore_eos
    assert coordinator.remaining_s is not None
    assert 0 < coordinator.remaining_s <= 30
    assert "traceparent" not in coordinator.metadata


def test_what_is_not_given_is_left_to_the_server(
    paceline: Paceline, coordinator: ScriptedCoordinator, address: str
) -> None:
    assert paceline("generate", "--address", address, "--prompt", "").exit_code == 0
    request = coordinator.requests[0]
    assert request.HasField("text")
    assert not any(request.HasField(name) for name in ("max_tokens", "seed", "gamma", "chat", "tokens"))  # type: ignore[arg-type]
    assert request.sampling.ByteSize() == 0
    assert request.stop.ByteSize() == 0
    assert request.verification == worker_pb2.VERIFICATION_UNSPECIFIED


def test_chat_and_system_become_messages(paceline: Paceline, coordinator: ScriptedCoordinator, address: str) -> None:
    assert paceline("generate", "--address", address, "--chat", "Hi", "--system", "Be kind").exit_code == 0
    messages = [(message.role, message.content) for message in coordinator.requests[0].chat.messages]
    assert messages == [(pb.ROLE_SYSTEM, "Be kind"), (pb.ROLE_USER, "Hi")]
    assert not coordinator.requests[0].HasField("text")


def test_token_ids_are_sent_as_they_are(paceline: Paceline, coordinator: ScriptedCoordinator, address: str) -> None:
    assert paceline("generate", "--address", address, "--token-ids", "1, 2,3").exit_code == 0
    assert list(coordinator.requests[0].tokens.ids) == [1, 2, 3]


def test_a_dash_reads_standard_input_byte_for_byte(
    paceline: Paceline, coordinator: ScriptedCoordinator, address: str
) -> None:
    assert paceline("generate", "--address", address, "--prompt", "-", input="a\r\né\n".encode()).exit_code == 0
    assert paceline("generate", "--address", address, "--chat", "-", input=b"hello").exit_code == 0
    assert coordinator.requests[0].text == "a\r\né\n"
    assert coordinator.requests[1].chat.messages[0].content == "hello"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Give exactly one prompt, --prompt, --chat or --token-ids: none was given."),
        (["--prompt", "a", "--chat", "b"], "--prompt and --chat were given."),
        (["--prompt", "", "--token-ids", "1"], "--prompt and --token-ids were given."),
        (["--prompt", "a", "--system", "b"], "--system goes with --chat, not with --prompt."),
        (["--prompt", "a", "--seed", "-1"], "-1 is not in 0 to 18446744073709551615"),
        (["--prompt", "a", "--seed", str(2**64)], f"{2**64} is not in 0 to 18446744073709551615"),
        (["--prompt", "a", "--max-tokens", str(2**31)], f"{2**31} is not in -2147483648 to 2147483647"),
        (["--prompt", "a", "--gamma", "many"], "'many' is not a whole number"),
        (["--token-ids", "1,x"], "'x' is not a whole number"),
        (["--prompt", "a", "--deadline", "0"], "0 is not above 0 and at most 1000000000 seconds"),
        (["--prompt", "a", "--deadline", "nan"], "nan is not above 0 and at most 1000000000 seconds"),
        (["--prompt", "\udcff"], "--prompt is not UTF-8."),
    ],
)
def test_wrong_usage_says_what_is_wrong(paceline: Paceline, arguments: list[str], message: str) -> None:
    done = paceline("generate", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stdout == ""


def test_input_that_is_not_utf8_is_refused(paceline: Paceline) -> None:
    done = paceline("generate", "--prompt", "-", input=b"ab\xff")
    assert done.exit_code == 2
    assert "--prompt - : standard input is not UTF-8 (byte 2)." in done.stderr


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_refusal_is_one_line_with_the_status(paceline: Paceline, serve: Serve, form: list[str]) -> None:
    refusing = ScriptedCoordinator(failure=(grpc.StatusCode.INVALID_ARGUMENT, "sampling.temperature is -1.0:\nmust be"))
    done = paceline("generate", "--address", serve(refusing), "--prompt", "a", "--temperature", "-1", *form)
    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr == "Error: INVALID_ARGUMENT: sampling.temperature is -1.0: must be\n"
    assert refusing.requests[0].sampling.temperature == -1


def test_a_failure_in_mid_text_ends_the_line(paceline: Paceline, serve: Serve) -> None:
    breaking = ScriptedCoordinator(list(scripted.chunks())[:1], (grpc.StatusCode.UNAVAILABLE, "the target is lost"))
    done = paceline("generate", "--address", serve(breaking), "--prompt", "a")
    assert done.exit_code == 1
    assert done.stdout == "Blue light\n"
    assert done.stderr == "Error: UNAVAILABLE: the target is lost\n"


def test_an_answer_without_a_result_is_a_failure(paceline: Paceline, serve: Serve) -> None:
    done = paceline("generate", "--address", serve(ScriptedCoordinator(list(scripted.chunks()))), "--prompt", "a")
    assert done.exit_code == 1
    assert "ended without a result" in done.stderr


def test_the_deadline_ends_the_call(paceline: Paceline, serve: Serve) -> None:
    silent = ScriptedCoordinator(endless=True)
    done = paceline("generate", "--address", serve(silent), "--prompt", "a", "--deadline", "3")
    assert done.exit_code == 1
    assert done.stderr == "Error: DEADLINE_EXCEEDED: the answer took longer than --deadline, 3 s\n"
    assert silent.cancelled.wait(30)


def test_a_dead_address_says_which_and_what_to_start(paceline: Paceline) -> None:
    with socket.socket() as taken:  # bound and not listening: refused, and nobody else can get it
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = paceline("generate", "--prompt", "a", env={"PACELINE_ADDRESS": address})
    assert done.exit_code == 1
    assert done.stderr.startswith(f"Error: UNAVAILABLE: no coordinator serves at {address} (")
    assert "`paceline up`" in done.stderr
    assert done.stderr.count("\n") == 1


def test_ctrl_c_cancels_the_call(serve: Serve) -> None:
    endless = ScriptedCoordinator(list(scripted.chunks()), endless=True)
    command = [sys.executable, "-c", "from services.cli.main import main; main()", "generate"]
    arguments = ["--address", serve(endless), "--prompt", "a"]
    with subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert os.read(process.stdout.fileno(), 4) == b"Blue"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert stderr == b""
    assert endless.cancelled.wait(5)


def test_the_command_never_imports_torch() -> None:
    code = "import sys, services.cli.generate; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_help_imports_no_sub_command(paceline: Paceline) -> None:
    code = "import sys; from services.cli.main import main; main(['--help'], standalone_mode=False)"
    code += "; print('grpc' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "target-worker" in done.stdout
    assert done.stdout.endswith("False\n")


def test_an_unknown_command_is_a_usage_error(paceline: Paceline) -> None:
    done = paceline("genrate")
    assert done.exit_code == 2
    assert "genrate" in done.stderr
