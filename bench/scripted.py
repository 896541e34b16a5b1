"""Workers that answer at once: both in one process, every row made before it is asked for.

`python -m bench.scripted --vocab-size 152064 --support 64`
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, ClassVar, TypeAlias

import grpc
import numpy as np
import numpy.typing as npt
from pydantic import Field
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from paceline.v1 import draft_pb2, target_pb2, worker_pb2
from services.common.rpc.codec import encode_row
from services.common.rpc.server import Server, run, run_process
from services.common.rpc.settings import ServerSettings, command
from services.common.specdec.sampling import sample
from services.common.specdec.types import Row

DRAFT, TARGET = "paceline.v1.DraftService", "paceline.v1.TargetService"
# Seven drafts of ten are kept.
_ALPHA = 0.7
# Ids that p has and q has not, and the other way round, in sparse rows.
_APART = 4
# Drafts to choose from: a dense one is 0.6 MB.
_DRAFTS = 64
_IDENTITY = worker_pb2.ModelIdentity(model_id="scripted", weights_hash="0" * 64, dtype="float32")

Context = grpc.aio.ServicerContext[Any, Any]


class ScriptedSettings(ServerSettings):
    """Settings of the scripted workers."""

    env_prefix: ClassVar[str] = "PACELINE_BENCH_"

    vocab_size: int = Field(152_064, ge=512, description="Entries of a row.")
    support: int = Field(0, ge=0, description="Tokens of a sparse row; 0 makes dense ones.")


class Script:
    """The replies of both workers, as bytes: a message in parts is the parts, one after the other."""

    def __init__(self, vocab_size: int, support: int, alpha: float = _ALPHA) -> None:
        """Make every part of every reply.

        Args:
            vocab_size: Entries of a row.
            support: Tokens of a sparse row; 0 makes dense ones.
            alpha: Share of the drafts that are kept.
        """
        self._rng = np.random.default_rng(1)
        p, q = _rows(self._rng, vocab_size, support, alpha)
        timing = worker_pb2.WorkerTiming(service_ms=0.01, worker_id="scripted")
        # Evenly over q, so that few of them have its law.
        tokens = [sample(q, (i + 0.5) / _DRAFTS) for i in range(_DRAFTS)]
        drafts = [draft_pb2.DraftToken(token=token, q=encode_row(q)) for token in tokens]
        self._drafts = [draft_pb2.ProposeResponse(drafts=[draft]).SerializeToString() for draft in drafts]
        self._row = target_pb2.VerifyResponse(rows=[encode_row(p)]).SerializeToString()
        self._drafted = draft_pb2.ProposeResponse(done=True, timing=timing).SerializeToString()
        self._verified = target_pb2.VerifyResponse(timing=timing).SerializeToString()

    def proposal(self, round_index: int, gamma: int) -> bytes:
        """Return the reply to a Propose: drafts drawn from q."""
        drafts = [self._drafts[i] for i in self._rng.integers(0, _DRAFTS, gamma)]
        head = draft_pb2.ProposeResponse(round=round_index).SerializeToString()
        return b"".join((head, *drafts, self._drafted))

    def draft(self, round_index: int) -> bytes:
        """Return a reply with one draft."""
        head = draft_pb2.ProposeResponse(round=round_index).SerializeToString()
        return head + self._drafts[self._rng.integers(0, _DRAFTS)]

    def verification(self, round_index: int, rows: int) -> bytes:
        """Return the reply to a Verify."""
        head = target_pb2.VerifyResponse(round=round_index).SerializeToString()
        return b"".join((head, *[self._row] * rows, self._verified))


def _rows(rng: np.random.Generator, vocab_size: int, support: int, alpha: float) -> tuple[Row, Row]:
    """Return p and q, as far apart as makes alpha what it is to be."""
    size = support + _APART if support else vocab_size
    ids = np.sort(rng.permutation(vocab_size)[:size]).astype(np.uint32)
    logits, noise = rng.standard_normal((2, size))
    # q lacks the last ids and p the first; alpha falls with the distance.
    first, last = (_APART, size - _APART) if support else (0, size)
    near, far = 0.0, 8.0
    while far - near > 1e-3:
        distance = (near + far) / 2
        p, q = np.zeros((2, size))
        p[first:], q[:last] = _softmax(logits[first:]), _softmax((logits + distance * noise)[:last])
        near, far = (distance, far) if np.minimum(p, q).sum() > alpha else (near, distance)
    if not support:
        return Row(p.astype(np.float32)), Row(q.astype(np.float32))
    return Row(p[first:].astype(np.float32), ids[first:]), Row(q[:last].astype(np.float32), ids[:last])


def _softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def _tokenizer(vocab_size: int) -> Tokenizer:
    """Return a byte-level tokenizer of many tokens, three letters each after the bytes."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = "abcdefghijklmnopqrstuvwxyz"
    for i in range(vocab_size - len(tokens)):
        tokens.append("Ġ" + "".join(letters[i // 26**k % 26] for k in range(4)))
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


Propose: TypeAlias = Callable[[AsyncIterator[draft_pb2.ProposeRequest], Context], Awaitable[None]]
Verify: TypeAlias = Callable[[AsyncIterator[target_pb2.VerifyRequest], Context], Awaitable[None]]


def handlers(vocab_size: int, propose: Propose, verify: Verify) -> Sequence[grpc.GenericRpcHandler]:
    """Return both services; the replies of the streams are bytes already."""
    info = worker_pb2.ModelInfo(identity=_IDENTITY, vocab_size=vocab_size, worker_id="scripted")
    tokenizer = target_pb2.GetTokenizerResponse(
        tokenizer_json=_tokenizer(vocab_size).to_str().encode(),
        generation_config_json=json.dumps({}),
        identity=_IDENTITY,
    )

    def unary(reply: bytes) -> grpc.RpcMethodHandler[Any, Any]:
        async def answer(_request: bytes, _context: Context) -> bytes:
            return reply

        return grpc.unary_unary_rpc_method_handler(answer)

    draft_info = draft_pb2.DraftServiceGetModelInfoResponse(model=info).SerializeToString()
    target_info = target_pb2.TargetServiceGetModelInfoResponse(model=info).SerializeToString()
    stream = grpc.stream_stream_rpc_method_handler
    return (
        grpc.method_handlers_generic_handler(
            DRAFT,
            {"Propose": stream(propose, draft_pb2.ProposeRequest.FromString), "GetModelInfo": unary(draft_info)},
        ),
        grpc.method_handlers_generic_handler(
            TARGET,
            {
                "Verify": stream(verify, target_pb2.VerifyRequest.FromString),
                "GetModelInfo": unary(target_info),
                "GetTokenizer": unary(tokenizer.SerializeToString()),
            },
        ),
    )


def _at_once(settings: ScriptedSettings, script: Script) -> Sequence[grpc.GenericRpcHandler]:
    async def propose(requests: AsyncIterator[draft_pb2.ProposeRequest], context: Context) -> None:
        async for request in requests:
            await context.write(script.proposal(request.round, request.gamma))

    async def verify(requests: AsyncIterator[target_pb2.VerifyRequest], context: Context) -> None:
        async for request in requests:
            await context.write(script.verification(request.round, request.rows))

    return handlers(settings.vocab_size, propose, verify)


@command(ScriptedSettings, name="scripted")
def main(settings: ScriptedSettings) -> None:
    """Serve both workers' RPCs from a script."""

    async def nothing() -> None:
        pass

    async def serve() -> None:
        server = Server(settings, [DRAFT, TARGET])
        server.grpc.add_generic_rpc_handlers(_at_once(settings, Script(settings.vocab_size, settings.support)))
        await run(server, nothing, nothing)

    run_process(settings, "scripted-workers", serve)


if __name__ == "__main__":
    main()
