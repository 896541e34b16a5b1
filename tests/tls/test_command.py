"""`paceline generate` over TLS, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from services.cli.access import PLAIN, access_to
from services.cli.generate import generate
from services.common.rpc.tls import ClientFiles, ClientTls
from tests.support.certificates import Authority
from tests.support.cluster import scripted_cluster
from tests.support.laws import close_law


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    stdout: str
    stderr: str


async def run(*arguments: str, env: dict[str, str] | None = None) -> Ended:
    """Run the command, in a process: it takes signals."""
    command = (sys.executable, "-c", "from services.cli.main import main; main()", "generate")
    process = await asyncio.create_subprocess_exec(
        *(*command, "--token-ids", "0,1", "--max-tokens", "4", *arguments),
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    stdout, stderr = await process.communicate()
    return Ended(process.returncode or 0, stdout.decode(), stderr.decode())


async def test_an_answer_over_tls(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    pair, mine = authority.issue("coordinator"), authority.issue("mine", dns=["mine"])
    tls = ClientTls(ClientFiles(authority.cert, mine.cert, mine.key))
    settings = {**pair.as_server, "tls_ca": authority.cert, "tls_clients": "mine"}
    async with scripted_cluster(close_law(distance=0.5, seed=2), tls=tls, **settings) as cluster:
        address = ("--address", cluster.coordinator.address, "--json")
        shown = ("--tls-cert", mine.cert, "--tls-key", mine.key)
        answered = await run(*address, *shown, env={"PACELINE_TLS_CA": authority.cert})
        assert answered.code == 0, answered.stderr
        assert json.loads(answered.stdout)["usage"]["completion_tokens"] == 4
        for refused in (await run(*address, *shown, "--tls-ca", other.cert), await run(*address)):
            assert refused.code == 1
            assert "Error: UNAVAILABLE: " in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--address", "dns:///coordinator:1"),
            "--address is dns:///coordinator:1, on another machine: needs --tls-ca",
        ),
        (("--tls-cert", "a", "--tls-key", "b"), "--tls-cert is a: needs --tls-ca"),
        (("--tls-ca", "a", "--tls-key", "b"), "--tls-key is b: needs --tls-cert too"),
        (("--tls-name", "a"), "--tls-name is a: needs --tls-ca"),
        (("--tls-ca", "nowhere.crt"), "nowhere.crt cannot be read: No such file"),
    ],
)
def test_what_it_refuses(arguments: tuple[str, ...], message: str) -> None:
    refused = CliRunner().invoke(generate, ["--token-ids", "0,1", *arguments])
    assert refused.exit_code != 0
    assert message in " ".join(refused.output.split())


def test_plain_text_elsewhere_when_it_is_asked_for() -> None:
    fields = {
        "tls_ca": "",
        "tls_cert": "",
        "tls_key": "",
        "tls_name": "",
        "token_file": "",
        "insecure": True,
        "prompt": "a",
    }
    assert access_to("dns:///coordinator:1", fields) == PLAIN
    assert fields == {"prompt": "a"}, "what is not of access is left"
