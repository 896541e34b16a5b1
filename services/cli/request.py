"""From what was typed to a GenerateRequest. Ranges are the server's to judge, so that its message is the one seen."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import click

from paceline.v1 import coordinator_pb2, worker_pb2

STDIN = "-"
VERIFICATIONS = {"token": worker_pb2.VERIFICATION_TOKEN, "coupled": worker_pb2.VERIFICATION_COUPLED}
_LONGEST_DEADLINE_S = 1e9


def int32(value: str) -> int:
    """Return a whole number that an int32 field can carry.

    Raises:
        click.BadParameter: It is none.
    """
    return _integer(value, -(2**31), 2**31 - 1)


def uint64(value: str) -> int:
    """Return a whole number that a uint64 field can carry.

    Raises:
        click.BadParameter: It is none.
    """
    return _integer(value, 0, 2**64 - 1)


def token_ids(value: str) -> tuple[int, ...]:
    """Return the ids of a list with commas.

    Raises:
        click.BadParameter: A part is no token id.
    """
    return tuple(int32(part) for part in value.split(",") if part.strip())


def seconds(value: str) -> float:
    """Return a length of time that a call's deadline can carry.

    Raises:
        click.BadParameter: It is none.
    """
    try:
        length_s = float(value)
    except ValueError:
        length_s = math.nan
    if not 0 < length_s <= _LONGEST_DEADLINE_S:
        raise click.BadParameter(f"{value} is not above 0 and at most {_LONGEST_DEADLINE_S:.0f} seconds")
    return length_s


def build_request(
    *,
    prompt: str | None = None,
    chat: str | None = None,
    system: str | None = None,
    token_ids: Sequence[int] | None = None,
    stop: Sequence[str] = (),
    stop_token_id: Sequence[int] = (),
    ignore_eos: bool = False,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    gamma: int | None = None,
    verification: str | None = None,
) -> coordinator_pb2.GenerateRequest:
    """Return the request; what is None is left to the server.

    Raises:
        click.UsageError: Not exactly one prompt, or text that is not UTF-8.
    """
    given = [flag for flag, value in _kinds(prompt, chat, token_ids) if value is not None]
    if len(given) != 1:
        found = "none was given" if not given else f"{' and '.join(given)} were given"
        raise click.UsageError(f"Give exactly one prompt, --prompt, --chat or --token-ids: {found}.")
    if system is not None and chat is None:
        raise click.UsageError(f"--system goes with --chat, not with {given[0]}.")
    return coordinator_pb2.GenerateRequest(
        text=_text("--prompt", prompt),
        chat=_chat(_text("--chat", chat), _text("--system", system)),
        tokens=None if token_ids is None else coordinator_pb2.TokenPrompt(ids=token_ids),
        sampling=worker_pb2.SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p),
        seed=seed,
        max_tokens=max_tokens,
        stop=coordinator_pb2.StopConditions(
            token_ids=stop_token_id, strings=[_utf8("--stop", text) for text in stop], ignore_eos=ignore_eos
        ),
        gamma=gamma,
        verification=VERIFICATIONS.get(verification or "", worker_pb2.VERIFICATION_UNSPECIFIED),
    )


def _integer(value: str, low: int, high: int) -> int:
    try:
        number = int(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a whole number") from None
    if not low <= number <= high:
        raise click.BadParameter(f"{number} is not in {low} to {high}")
    return number


def _kinds(prompt: str | None, chat: str | None, token_ids: Sequence[int] | None) -> list[tuple[str, object]]:
    return [("--prompt", prompt), ("--chat", chat), ("--token-ids", token_ids)]


def _chat(user: str | None, system: str | None) -> coordinator_pb2.ChatPrompt | None:
    if user is None:
        return None
    messages = [coordinator_pb2.ChatMessage(role=coordinator_pb2.ROLE_USER, content=user)]
    if system is not None:
        messages.insert(0, coordinator_pb2.ChatMessage(role=coordinator_pb2.ROLE_SYSTEM, content=system))
    return coordinator_pb2.ChatPrompt(messages=messages)


def _text(flag: str, text: str | None) -> str | None:
    """Return the text of an option, read from standard input where it is `-`."""
    if text is None:
        return None
    if text != STDIN or flag == "--system":
        return _utf8(flag, text)
    try:
        # As bytes: the text layer would turn \r\n into \n, and a raw prompt is sent as it is.
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{flag} - : standard input is not UTF-8 (byte {error.start}).") from None


def _utf8(flag: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise click.UsageError(f"{flag} is not UTF-8.") from None
    return text
