"""How an answer is shown: coloured tokens on a terminal, plain text in a pipe, or one JSON object."""

from __future__ import annotations

import sys
from typing import Any

from google.protobuf.message import Message
from rich.console import Console

from paceline.v1 import coordinator_pb2, worker_pb2
from services.cli.client import Answer

STYLES = {
    coordinator_pb2.TOKEN_ORIGIN_ACCEPTED_DRAFT: "green",
    coordinator_pb2.TOKEN_ORIGIN_RESIDUAL: "red",
    coordinator_pb2.TOKEN_ORIGIN_BONUS: "cyan",
    coordinator_pb2.TOKEN_ORIGIN_TARGET: "default",
}
# What a model writes must not steer the terminal: control characters, except line feed and tab, become U+FFFD.
_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class TokenPrinter:
    """Writes tokens as they arrive."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.written = False

    def __call__(self, tokens: list[coordinator_pb2.Token]) -> None:
        """Write some tokens, coloured by origin if the console is a terminal."""
        self.written = True
        if not self._console.is_terminal:
            self._console.file.write("".join(token.text for token in tokens))
            self._console.file.flush()
            return
        for token in tokens:
            text = token.text.translate(_CONTROLS)
            self._console.out(text, style=STYLES.get(token.origin), highlight=False, end="")

    def end(self) -> None:
        """End the last line."""
        self._console.file.write("\n")
        self._console.file.flush()


def stdout_console() -> Console:
    """Return a console on standard output as it is now."""
    return Console(file=sys.stdout, highlight=False)


def stderr_console() -> Console:
    """Return a console on standard error as it is now."""
    return Console(file=sys.stderr, highlight=False)


def table_console(out: Console) -> Console | None:
    """Return where the closing table goes: a terminal, but never into a pipe that takes the answer."""
    return next((console for console in (out, stderr_console()) if console.is_terminal), None)


def origin_name(origin: coordinator_pb2.TokenOrigin.ValueType) -> str:
    """Return an origin as in the JSON, for example `accepted_draft`."""
    return coordinator_pb2.TokenOrigin.Name(origin).removeprefix("TOKEN_ORIGIN_").lower()


def finish_reason(result: coordinator_pb2.GenerateResult) -> str:
    """Return why the answer ended: `eos`, `stop` or `length`."""
    return coordinator_pb2.FinishReason.Name(result.finish_reason).removeprefix("FINISH_REASON_").lower()


def verification_name(result: coordinator_pb2.GenerateResult) -> str:
    """Return the rule that was used: `token` or `coupled`."""
    return worker_pb2.Verification.Name(result.verification).removeprefix("VERIFICATION_").lower()


def answer_object(answer: Answer) -> dict[str, Any]:
    """Return the object that `--json` prints."""
    result = answer.result
    return {
        "text": answer.text,
        "token_ids": [token.id for token in answer.tokens],
        "origins": [origin_name(token.origin) for token in answer.tokens],
        "prompt_token_ids": list(result.prompt_token_ids),
        "finish_reason": finish_reason(result),
        "usage": _plain(result.usage),
        "seed": result.seed,
        "gamma": result.gamma,
        "adaptive_gamma": result.adaptive_gamma,
        "verification": verification_name(result),
        "sampling": _plain(result.sampling),
        "max_tokens": result.max_tokens,
        "request_id": result.request_id,
        "trace_id": result.trace_id,
        "speculation": _plain(result.speculation),
    }


def _plain(message: Message) -> dict[str, Any]:
    """Return every field of a message; protobuf's own JSON writes 64-bit integers as strings."""
    values: dict[str, Any] = {}
    for descriptor in message.DESCRIPTOR.fields:
        value = getattr(message, descriptor.name)
        if descriptor.is_repeated:
            values[descriptor.name] = [_plain(item) if isinstance(item, Message) else item for item in value]
        elif descriptor.has_presence and not message.HasField(descriptor.name):
            values[descriptor.name] = None
        else:
            values[descriptor.name] = _plain(value) if isinstance(value, Message) else value
    return values
