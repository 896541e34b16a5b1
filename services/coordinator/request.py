"""A GenerateRequest checked, and every default filled in: what is wrong is said by field, value and limit."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import worker_pb2
from services.common.rpc.codec import decode_sampling, decode_verification
from services.common.specdec.errors import InvalidFieldError
from services.common.specdec.types import MAX_FEATURE_BYTES, MAX_GAMMA, SamplingParams, VerificationMode
from services.coordinator.answer import StopRules
from services.coordinator.config import CoordinatorSettings
from services.coordinator.text import TextCodec
from services.coordinator.types import Plan

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 256
MAX_STOP_TOKEN_IDS = 256
_NO_LIMIT = 2**31 - 1
# Of a worker's message, for what is neither rows nor hidden states.
_ROOM_BYTES = 2**16
_ROLES = {pb.ROLE_SYSTEM: "system", pb.ROLE_USER: "user", pb.ROLE_ASSISTANT: "assistant"}


@dataclass(frozen=True, slots=True)
class Target:
    """The target that a request begins with, and goes on with to its end.

    Attributes:
        info: Identity, sizes and eos ids.
        codec: Tokenizer and chat template.
        defaults: Sampling parameters from the model's generation config.
    """

    info: worker_pb2.ModelInfo
    codec: TextCodec
    defaults: SamplingParams

    @property
    def context_length(self) -> int:
        """Longest sequence, in tokens."""
        return self.info.context_length or _NO_LIMIT


def default_sampling(generation_config_json: str) -> SamplingParams:
    """Return the sampling parameters that a model's author set; neutral ones where none were set."""
    config = json.loads(generation_config_json or "{}")
    temperature = config.get("temperature")
    if config.get("do_sample") is False:
        temperature = 0.0
    # Authors write "keep all" in several ways: top_k -1, top_p 0, null.
    return SamplingParams(
        temperature=1.0 if temperature is None else float(temperature),
        top_k=max(0, int(config.get("top_k") or 0)),
        top_p=float(config.get("top_p") or 1.0),
        min_p=float(config.get("min_p") or 0.0),
    )


def check_request_id(request_id: str) -> str:
    """Return the request's id, or a new one where it has none.

    Raises:
        InvalidFieldError: Longer than 128 characters, or not printable ASCII.
    """
    if len(request_id) > 128 or not (request_id.isascii() and request_id.isprintable()):
        raise InvalidFieldError("request_id", request_id, "at most 128 printable ASCII characters")
    return request_id or secrets.token_hex(8)


def plan(request: pb.GenerateRequest, request_id: str, target: Target, settings: CoordinatorSettings) -> Plan:
    """Check a request and fill in its defaults. Tokenises, so it belongs off the event loop.

    Raises:
        InvalidFieldError: A field whose value is not allowed.
    """
    prompt = _prompt(request, target)
    # Under COUPLED nothing that depends on the clock, gamma or the drafts changes the tokens: what a seed is given for.
    seeded = request.HasField("seed")
    usual = VerificationMode.COUPLED if seeded else VerificationMode.TOKEN
    verification = decode_verification("verification", request.verification, usual)
    may_adapt = not (seeded and verification is VerificationMode.TOKEN)
    adaptive = may_adapt and settings.adaptive_gamma and not request.HasField("gamma")
    return Plan(
        request_id=request_id,
        prompt=prompt,
        params=decode_sampling(request.sampling, target.defaults),
        seed=request.seed if seeded else secrets.randbits(64),
        max_tokens=_max_tokens(request, len(prompt), target.context_length, settings.default_max_tokens),
        gamma=_gamma(request, target.info, settings, settings.max_gamma if adaptive else settings.default_gamma),
        stop=_stop_rules(request.stop, target.info),
        vocab_size=target.info.vocab_size,
        verification=verification,
        may_adapt=may_adapt,
        adaptive_gamma=adaptive,
    )


def feature_room(message_mib: int) -> int:
    """Return how many bytes of hidden states there may be in a message: a quarter, the rest is for rows."""
    return min(MAX_FEATURE_BYTES, message_mib * 2**20 // 4)


def whole_rows(target: worker_pb2.ModelInfo, message_mib: int) -> int:
    """Return how many whole rows a message has room for, beside the hidden states that may come with them."""
    states = feature_room(message_mib) if target.features.width else 0
    return (message_mib * 2**20 - _ROOM_BYTES - states) // (4 * target.vocab_size)


def _gamma(
    request: pb.GenerateRequest, target: worker_pb2.ModelInfo, settings: CoordinatorSettings, default: int
) -> int:
    # A reply with more dense rows than fit in a message would look like a lost target, again and again.
    fit = MAX_GAMMA if settings.partial_rows else max(0, whole_rows(target, settings.max_message_mib) - 1)
    if not request.HasField("gamma"):
        return min(default, fit)
    if not 0 <= request.gamma <= settings.max_gamma:
        raise InvalidFieldError("gamma", request.gamma, f"0 to {settings.max_gamma} (--max-gamma)")
    if request.gamma > fit:
        held = f"what {settings.max_message_mib} MiB (--max-message-mib) hold of rows of {target.vocab_size} ids"
        raise InvalidFieldError("gamma", request.gamma, f"at most {fit}, {held}")
    return request.gamma


def _prompt(request: pb.GenerateRequest, target: Target) -> tuple[int, ...]:
    given = [kind for kind in ("text", "chat", "tokens") if request.HasField(kind)]
    if len(given) != 1:
        raise InvalidFieldError("prompt", " and ".join(given) or "empty", "exactly one of text, chat and tokens")
    limit = target.context_length - 1
    if request.HasField("text"):
        ids = target.codec.encode_text(request.text, limit)
    elif request.HasField("chat"):
        ids = target.codec.encode_chat(_messages(request.chat, limit), limit)
    elif len(request.tokens.ids) > limit:
        raise _too_long("tokens", len(request.tokens.ids), limit)
    else:
        ids = _token_ids("tokens.ids", request.tokens.ids, target.info.vocab_size)
    if not ids:
        raise InvalidFieldError(given[0], "an empty prompt", "at least one token long")
    if len(ids) > limit:
        raise _too_long(given[0], len(ids), limit)
    if (highest := max(ids)) >= target.info.vocab_size:
        # A tokenizer may have special tokens that its model was never made to have.
        raise InvalidFieldError(
            given[0],
            f"a prompt with token {highest}",
            f"of tokens 0 to {target.info.vocab_size - 1}, those of the model",
        )
    return tuple(ids)


def _too_long(field: str, length: int, limit: int) -> InvalidFieldError:
    return InvalidFieldError(
        field, f"a prompt of {length} tokens", f"at most {limit}: the context less one token to generate"
    )


def _messages(chat: pb.ChatPrompt, limit: int) -> list[tuple[str, str]]:
    if not chat.messages:
        raise InvalidFieldError("chat.messages", "empty", "at least one message")
    # Each is a token at the least: what cannot fit is refused before it is looked at one by one.
    if len(chat.messages) > limit:
        raise InvalidFieldError("chat.messages", f"{len(chat.messages)} messages", f"at most {limit}, one token each")
    messages = []
    for i, message in enumerate(chat.messages):
        if message.role not in _ROLES:
            names = ", ".join(pb.Role.Name(role) for role in _ROLES)
            raise InvalidFieldError(f"chat.messages[{i}].role", message.role, f"one of {names}")
        messages.append((_ROLES[message.role], message.content))
    return messages


def _max_tokens(request: pb.GenerateRequest, prompt_length: int, context_length: int, default: int) -> int:
    room = context_length - prompt_length
    if not request.HasField("max_tokens"):
        return min(default, room)
    if not 1 <= request.max_tokens <= room:
        raise InvalidFieldError(
            "max_tokens",
            request.max_tokens,
            f"1 to {room}: the context of {context_length} tokens less the prompt of {prompt_length}",
        )
    return request.max_tokens


def _stop_rules(stop: pb.StopConditions, info: worker_pb2.ModelInfo) -> StopRules:
    if len(stop.strings) > MAX_STOP_STRINGS:
        raise InvalidFieldError("stop.strings", f"{len(stop.strings)} strings", f"at most {MAX_STOP_STRINGS}")
    for i, string in enumerate(stop.strings):
        if not 1 <= len(string) <= MAX_STOP_STRING_LENGTH:
            raise InvalidFieldError(
                f"stop.strings[{i}]", f"{len(string)} characters", f"1 to {MAX_STOP_STRING_LENGTH} characters"
            )
    if len(stop.token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidFieldError("stop.token_ids", f"{len(stop.token_ids)} ids", f"at most {MAX_STOP_TOKEN_IDS}")
    return StopRules(
        eos_ids=frozenset() if stop.ignore_eos else frozenset(info.eos_token_ids),
        token_ids=frozenset(_token_ids("stop.token_ids", stop.token_ids, info.vocab_size)),
        strings=tuple(stop.strings),
    )


def _token_ids(field: str, ids: Iterable[int], vocab_size: int) -> list[int]:
    checked = list(ids)
    for i, token in enumerate(checked):
        if not 0 <= token < vocab_size:
            raise InvalidFieldError(f"{field}[{i}]", token, f"0 to {vocab_size - 1}")
    return checked
