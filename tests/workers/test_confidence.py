"""When a draft stops early: what it learns of its drafts, and that no token that it samples is held back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from services.common.engine.engine import Engine
from services.common.engine.processors import distributions
from services.common.specdec.acceptance import accept
from services.common.specdec.randomness import uniform
from services.common.specdec.types import Draft, Row, SamplingParams
from services.draft_worker import model_proposer
from services.draft_worker.confidence import Calibration, EarlyStop, Fates, Guess
from services.draft_worker.model_proposer import ModelProposer, ModelProposeSession
from services.draft_worker.proposer import ProposalRequest, SessionRequest
from tests.support.engines import Library, StartEngine, load
from tests.support.models import VOCAB, make_tiny_llama
from tests.support.statistics import chi_square

PLAIN = SamplingParams()
PROMPT = list(range(2, 22))
SHARPER = 2.0


class Judged(Calibration):
    """Remembers what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[float, bool]] = []

    def observe(self, probability: float, kept: bool) -> None:
        self.told.append((probability, kept))
        super().observe(probability, kept)


def drafted(fates: Fates, first: int, tokens: Sequence[int]) -> None:
    for i, token in enumerate(tokens, first):
        fates.add(Guess(i, token, i / 100))


@pytest.mark.parametrize(
    ("base", "tokens", "told"),
    [
        (12, [9], [(0.1, True), (0.11, True), (0.12, False)]),
        (10, [9], [(0.1, False)]),
        (13, [9], [(0.1, True), (0.11, True), (0.12, True)]),
        # The worker is sent what it knows already.
        (10, [5, 6, 9], [(0.1, True), (0.11, True), (0.12, False)]),
        (12, [7, 9], [(0.1, True), (0.11, True), (0.12, True)]),
        # Drafting runs ahead: nothing is decided.
        (12, [7], []),
        (13, [], []),
        # The text was cut, by whoever it was: what is no longer there was not rejected.
        (10, [5], [(0.1, True)]),
    ],
)
def test_what_became_of_drafts(base: int, tokens: list[int], told: list[tuple[float, bool]]) -> None:
    judged = Judged()
    fates = Fates(judged)
    drafted(fates, 10, [5, 6, 7])
    fates.tell(base, tokens)
    assert judged.told == told


def test_the_pass_before_one_that_runs_ahead_is_over() -> None:
    judged = Judged()
    fates = Fates(judged)
    drafted(fates, 10, [5])
    fates.tell(10, [5])
    drafted(fates, 11, [6, 7])
    assert judged.told == []
    fates.tell(12, [7])
    assert judged.told == [(0.1, True)]
    drafted(fates, 13, [8])
    fates.tell(12, [1])
    assert judged.told == [(0.1, True), (0.11, True), (0.12, False)]


def test_rates_are_learned() -> None:
    calibration, chance = Calibration(), random.Random(1)
    for _ in range(4000):
        probability = chance.random()
        calibration.observe(probability, chance.random() < probability**2)
    assert calibration.alpha == pytest.approx(1 / 3, abs=0.05)
    assert calibration.keep(0.95) == pytest.approx(0.95**2, abs=0.05)
    assert calibration.keep(0.4) == pytest.approx(0.18, abs=0.05)
    assert calibration.keep(0.01) < 0.05


def test_a_proposal_ends_when_the_next_token_is_hardly_reached() -> None:
    calibration = Calibration()
    stop = EarlyStop(Fates(calibration), calibration, stop_below=0.2)
    logits = torch.tensor([[0.0, 0.0, 3.0]])
    assert stop.goes_on
    stop.sampled(5, 2, logits, 2)
    assert stop.goes_on, "kept with .9, and the next with .5"
    stop.sampled(6, 0, logits, 0)
    assert not stop.goes_on, "of little probability"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "draft", context=64)


@pytest.fixture
async def engine(folder: Path, start_engine: StartEngine) -> Engine:
    return await start_engine(folder)


async def propose(
    session: ModelProposeSession, round_index: int, base: int, tokens: list[int], gamma: int, stop_below: float
) -> list[Draft]:
    request = ProposalRequest(round_index, base, tokens, gamma, stop_below=stop_below)
    return [draft async for drafts in session.propose(request) for draft in drafts]


def taught(proposer: ModelProposer, kept: bool) -> None:
    """Have a drafter see drafts of every probability kept, or rejected."""
    for calibration in proposer._calibrations:
        for i in range(4000):
            calibration.observe(i % 100 / 100, kept)


async def test_every_token_that_is_sampled_is_sent(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stop comes before the next token exists: with it or without it, the drafts before it are the same."""
    sampled: list[int] = []
    sample = model_proposer.sample

    def recorded(q: Row, number: float) -> int:
        sampled.append(sample(q, number))
        return sampled[-1]

    monkeypatch.setattr(model_proposer, "sample", recorded)
    lengths = set()
    for seed in range(8):
        proposer = ModelProposer(engine)
        whole = await propose(await proposer.open(SessionRequest(PLAIN, seed, 20, 40)), 3, 0, PROMPT, 6, 0.0)
        sampled.clear()
        # A model with random weights gives all tokens about 1 in 320: each step halves and more what is reached.
        session = await proposer.open(SessionRequest(PLAIN, seed, 20, 40))
        drafts = await propose(session, 3, 0, PROMPT, 6, stop_below=0.01 + 0.02 * (seed % 4))
        assert [draft.token for draft in drafts] == sampled == [draft.token for draft in whole[: len(drafts)]]
        assert session.timing.forward_tokens == 20 + len(drafts) - 1, "no step whose q is thrown away"
        lengths.add(len(drafts))
    assert len(whole) == 6
    assert len(lengths) > 1
    assert max(lengths) < 6


async def test_the_next_round_goes_on_after_an_early_stop(engine: Engine, folder: Path) -> None:
    proposer = ModelProposer(engine)
    taught(proposer, kept=False)
    session = await proposer.open(SessionRequest(PLAIN, 1, 20, 40))
    (first,) = await propose(session, 0, 0, PROMPT, 6, stop_below=0.2)
    second, *_ = await propose(session, 1, 21, [7], 6, stop_below=0.0)
    (q,) = distributions(Library(folder).logits([*PROMPT, first.token, 7], 1), PLAIN)
    np.testing.assert_allclose(second.q.dense(VOCAB), q.dense(VOCAB), atol=1e-5)
    assert session.timing.forward_tokens == 2 + 5


async def test_a_drafter_learns_from_the_text_that_follows(engine: Engine) -> None:
    proposer = ModelProposer(engine)
    session = await proposer.open(SessionRequest(PLAIN, 1, 20, 400))
    base, tokens = 0, PROMPT
    for i in range(6):
        drafts = await propose(session, i, base, tokens, 3, stop_below=0.001)
        base, tokens = base + len(tokens) + len(drafts), [7]
    calibration = proposer._calibrations[False]
    assert calibration.alpha > 0.7
    other = proposer._calibrations[True]
    assert other.alpha == 0.5, "at temperature 0 nothing has been seen"


async def test_law_with_a_draft_that_stops(folder: Path, start_engine: StartEngine) -> None:
    """Two tokens after a prompt, by the rule: their law is p's, where proposals end at unlikely tokens."""
    params = SamplingParams(top_k=3)
    loaded = load(folder)
    with torch.no_grad():
        # The same law as the target's, surer of itself.
        loaded.model.model.norm.weight.mul_(SHARPER)
    engine = await start_engine(loaded)
    library, cache = Library(folder), dict[tuple[int, ...], Row]()

    def p_row(text: Sequence[int]) -> Row:
        if (key := tuple(text)) not in cache:
            (cache[key],) = distributions(library.logits(list(text), 1), params)
        return cache[key]

    proposer = ModelProposer(engine)
    for i in range(4000):
        proposer._calibrations[False].observe(i % 100 / 100, i % 100 > 20)
    lengths: list[int] = []
    firsts = {int(token): i for i, token in enumerate(p_row(PROMPT).support)}
    counts = np.zeros((1, 9), np.int64)
    for seed in range(800):
        session = await proposer.open(SessionRequest(params, seed, 20, 8))
        text, index = list(PROMPT), 0
        while len(text) < 22:
            drafts = await propose(session, index, 0, text, 2, stop_below=0.3)
            lengths.append(len(drafts))
            rows = [p_row([*text, *(d.token for d in drafts[:i])]) for i in range(len(drafts) + 1)]
            decision = accept(rows, drafts, VOCAB, lambda o, p, s=seed, i=index: uniform(s, i, o, p))
            text += decision.tokens
            index += 1
        session.close()
        seconds = {int(token): i for i, token in enumerate(p_row(text[:21]).support)}
        counts[0, 3 * firsts[text[20]] + seconds[text[21]]] += 1
    law = np.array([[a * b for t, a in _weights(p_row(PROMPT)) for _, b in _weights(p_row([*PROMPT, t]))]])
    assert len(set(lengths)) > 1
    assert chi_square("two tokens", counts, law / law.sum()).passed


def _weights(row: Row) -> list[tuple[int, float]]:
    return [(int(token), float(row.weight(int(token)))) for token in row.support]
