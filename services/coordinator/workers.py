"""Which workers there are: the target that requests begin with, and whether the draft fits it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import OrderedDict
from collections.abc import Iterator

import grpc

from paceline.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc, worker_pb2
from services.common.rpc.channel import open_channel
from services.common.rpc.metered import metered
from services.common.rpc.tls import ClientTls
from services.coordinator.clients.features import is_fed
from services.coordinator.config import CoordinatorSettings
from services.coordinator.instruments import Instruments
from services.coordinator.request import Target, default_sampling
from services.coordinator.text import TextCodec

log = logging.getLogger(__name__)

TARGET_SERVICE = "paceline.v1.TargetService"
DRAFT_SERVICE = "paceline.v1.DraftService"
# How often workers are asked who they are: often while one is missing, else only to notice a roll-out.
_MISSING_S = 0.25
_KNOWN_S = 5.0
_CALL_S = 10.0
_KNOWN_TARGETS = 4
# One that loads its model gives no answer either, which is nothing to tell of at every start.
_LOADING_S = 10.0


@dataclasses.dataclass(slots=True)
class _Fault:
    """What is wrong with asking a worker, and since when it has been just that."""

    text: str
    since_s: float
    told: bool = False


class Workers:
    """Channels to the workers, and who they were when last asked.

    Attributes:
        target_stub: The target workers.
        draft_stub: The draft workers, or None where none are configured.
        target: The target for new requests, None until the first has been found.
        draft: The draft for new requests, None while there is none that fits the target.
    """

    def __init__(self, settings: CoordinatorSettings, instruments: Instruments) -> None:
        """Open the channels.

        Raises:
            StartupError: Certificates cannot be read or used.
        """
        self._instruments = instruments
        self._channels: list[grpc.aio.Channel] = []
        files = settings.worker_files
        tls = ClientTls(files) if files else None
        for address in settings.open_links.values():
            log.warning("in plain text to %s, as --insecure asks: who is on the way can read and change it", address)

        def channel(address: str, service: str) -> grpc.aio.Channel:
            opened = open_channel(
                address, service, max_message_mib=settings.max_message_mib, keepalive_s=settings.keepalive_s, tls=tls
            )
            self._channels.append(opened)
            return opened

        def counted(channel: grpc.aio.Channel, worker: str) -> grpc.aio.Channel:
            return metered(channel, *(instruments.count_payload(worker, way) for way in ("sent", "received")))

        # Questions go over channels of their own, which share the connections: a channel takes its pods in turn, and a
        # question after each attempt to open a session takes every other turn. Of two pods one would never be tried.
        self.target_stub: target_pb2_grpc.TargetServiceAsyncStub
        self.target_stub = target_pb2_grpc.TargetServiceStub(
            counted(channel(settings.target, TARGET_SERVICE), "target")
        )
        self._ask_target: target_pb2_grpc.TargetServiceAsyncStub
        self._ask_target = target_pb2_grpc.TargetServiceStub(channel(settings.target, TARGET_SERVICE))
        self.draft_stub: draft_pb2_grpc.DraftServiceAsyncStub | None = None
        self._ask_draft: draft_pb2_grpc.DraftServiceAsyncStub | None = None
        if settings.draft:
            self.draft_stub = draft_pb2_grpc.DraftServiceStub(counted(channel(settings.draft, DRAFT_SERVICE), "draft"))
            self._ask_draft = draft_pb2_grpc.DraftServiceStub(channel(settings.draft, DRAFT_SERVICE))
        self.target: Target | None = None
        self.draft: worker_pb2.ModelInfo | None = None
        # Those seen last: in a roll-out two models answer in turn, and a tokenizer takes a moment to build.
        self._known: OrderedDict[bytes, Target] = OrderedDict()
        self._found = asyncio.Event()
        self._changed = asyncio.Event()
        self._judged = ""
        self._faults: dict[str, _Fault] = {}
        # Whether one answered when last asked, and was one to use.
        self._is_there = {"target": False} | ({"draft": False} if settings.draft else {})
        instruments.watch_workers(lambda: self._is_there)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to look for the workers."""
        self._tasks = [asyncio.create_task(self._watch_target())]
        if self._ask_draft is not None:
            self._tasks.append(asyncio.create_task(self._watch_draft(self._ask_draft)))

    async def wait_for_target(self) -> None:
        """Wait until the first target has been found."""
        await self._found.wait()

    def serves(self, target: Target) -> bool:
        """Return whether new requests get this target."""
        return self.target is not None and self.target.info.identity == target.info.identity

    def recheck(self) -> None:
        """Ask the workers again who they are, now: a stream to one of them was lost."""
        self._changed.set()

    async def close(self) -> None:
        """Stop looking and close the channels."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for channel in self._channels:
            await channel.close()

    async def _watch_target(self) -> None:
        while True:
            is_there = False
            with self._reported("target"):
                is_there = await self._find_target()
            self._is_there["target"] = is_there
            await self._pause(found=self.target is not None)

    async def _find_target(self) -> bool:
        """Ask for the target, and return whether one has answered that can be used."""
        reply = await self._ask_target.GetModelInfo(target_pb2.TargetServiceGetModelInfoRequest(), timeout=_CALL_S)
        info = reply.model
        key = info.identity.SerializeToString(deterministic=True)
        target = self._known.get(key) or await self._describe(info)
        if target is None:
            return False
        if self.target is None or info.identity != self.target.info.identity:
            log.info("target: %s %s on %s", info.identity.model_id, info.identity.dtype, info.worker_id)
        # The same model may be served otherwise now, with other hidden states kept for instance.
        self.target = self._known[key] = dataclasses.replace(target, info=info)
        self._known.move_to_end(key)
        while len(self._known) > _KNOWN_TARGETS:
            self._known.popitem(last=False)
        self._found.set()
        return True

    async def _describe(self, info: worker_pb2.ModelInfo) -> Target | None:
        """Return a model with its tokenizer; None where the tokenizer that came is another model's."""
        # Of two pods, with different models in the middle of a roll-out, it is the other's turn now, and then the first
        # one's again.
        for _ in range(2):
            files = await self._ask_target.GetTokenizer(target_pb2.GetTokenizerRequest(), timeout=_CALL_S)
            if files.identity == info.identity:
                break
        else:
            log.info("target: the tokenizer is another worker's than the model, asking again")
            return None
        # Building a tokenizer takes a good part of a second.
        codec = await asyncio.to_thread(
            TextCodec, files.tokenizer_json, files.chat_template, dict(files.special_tokens)
        )
        return Target(info, codec, default_sampling(files.generation_config_json))

    async def _watch_draft(self, stub: draft_pb2_grpc.DraftServiceAsyncStub) -> None:
        await self._found.wait()
        while True:
            found: worker_pb2.ModelInfo | None = None
            with self._reported("draft"):
                reply = await stub.GetModelInfo(draft_pb2.DraftServiceGetModelInfoRequest(), timeout=_CALL_S)
                found = reply.model
            # One that does not answer stays what it was: its sessions notice by themselves when it is gone.
            if found is not None:
                self.draft = found if self._fits(found) else None
            self._is_there["draft"] = found is not None and self.draft is not None
            await self._pause(found=self.draft is not None)

    def _fits(self, draft: worker_pb2.ModelInfo) -> bool:
        """Return whether the draft's ids mean what the target's mean; log it once for each pair."""
        assert self.target is not None
        ours, theirs = self.target.info.tokenizer_fingerprint, draft.tokenizer_fingerprint
        kept, needed = self.target.info.features, draft.features
        has_states = not draft.HasField("features") or is_fed(draft, kept)
        fits = has_states and theirs in ("", ours) and draft.vocab_size in (0, self.target.info.vocab_size)
        judged = f"{ours} {theirs} {draft.identity.model_id} {list(kept.layers)} {list(needed.layers)}"
        if judged == self._judged:
            return fits
        self._judged = judged
        if fits:
            log.info("draft: %s on %s", draft.identity.model_id, draft.worker_id)
        else:
            self._instruments.mismatch.add(1, {"target.fingerprint": ours, "draft.fingerprint": theirs})
            if not has_states:
                log.warning(
                    "draft %s is not used: it is fed with layers %s (%d numbers), the target keeps %s (%d)",
                    *(draft.identity.model_id, list(needed.layers), needed.width, list(kept.layers), kept.width),
                )
                return False
            log.warning(
                "draft %s is not used: its tokenizer is %s (%d ids), the target's %s (%d ids); serving with gamma 0",
                *(draft.identity.model_id, theirs, draft.vocab_size, ours, self.target.info.vocab_size),
            )
        return fits

    async def _pause(self, found: bool) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), _KNOWN_S if found else _MISSING_S)
        # Lost streams come in bursts: one question answers them all.
        await asyncio.sleep(_MISSING_S)

    @contextlib.contextmanager
    def _reported(self, which: str) -> Iterator[None]:
        """Log what went wrong with asking a worker, once as long as it stays the same, and go on."""
        try:
            yield
            self._faults.pop(which, None)
        except grpc.aio.AioRpcError as error:
            fault = f"{error.code().name}: {error.details()}"
            held = self._faults.get(which)
            if held is None or held.text != fault:
                held = self._faults[which] = _Fault(fault, time.monotonic())
            loads = error.code() is grpc.StatusCode.UNAVAILABLE
            if not held.told and time.monotonic() - held.since_s >= (_LOADING_S if loads else 0.0):
                held.told = True
                log.log(logging.INFO if loads else logging.WARNING, "no answer of a %s worker: %s", which, fault)
        except Exception:
            log.exception("the %s worker's answer cannot be used", which)
