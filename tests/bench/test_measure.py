from __future__ import annotations

from collections import Counter

import pytest

from bench.measure import MODES, UnfairRunError, measure, plan
from bench.prompts import load_prompts
from tests.bench.fakes import HASH, FakeSystem, question

NAMES = ("a", "b", "c")


def test_systems_are_interleaved_and_each_of_them_comes_first_as_often() -> None:
    systems = [FakeSystem(name) for name in NAMES]
    steps = list(plan(systems, [question(i) for i in range(12)], repeats=2))
    assert len(steps) == 2 * 12 * len(MODES) * len(NAMES)
    blocks = [steps[i : i + 3] for i in range(0, len(steps), 3)]
    for block in blocks:
        assert {step.system.name for step in block} == set(NAMES)
        assert len({(step.mode, step.repeat, step.question.question_id) for step in block}) == 1
    for mode in MODES:
        firsts = Counter(block[0].system.name for block in blocks if block[0].mode == mode)
        assert set(firsts.values()) == {8}


async def test_all_systems_get_the_same_jobs_and_repeats_get_other_seeds() -> None:
    systems = [FakeSystem(name) for name in NAMES]
    runs = await measure(
        systems, [question(4), question(5)], repeats=2, tokens=6, weights_hash=HASH, on_step=lambda _: None
    )
    assert len(runs) == 24
    assert systems[0].jobs == systems[1].jobs == systems[2].jobs
    assert len({(job.seed, job.temperature) for job in systems[0].jobs}) == 8
    assert {job.tokens for job in systems[0].jobs} == {6}


@pytest.mark.parametrize(
    ("system", "message"),
    [
        (FakeSystem("a", extra_tokens=1), "a wrote 7 tokens, not 6"),
        (FakeSystem("a", weights_hash="cd" * 32), "a uses weights cdcdcdcdcdcd, not abababababab"),
    ],
)
async def test_unequal_work_is_refused(system: FakeSystem, message: str) -> None:
    with pytest.raises(UnfairRunError, match=message):
        await measure([system], [question()], repeats=1, tokens=6, weights_hash=HASH, on_step=lambda _: None)


def test_prompts_are_one_of_each_category() -> None:
    prompts = load_prompts()
    assert len(prompts) == len({prompt.category for prompt in prompts}) == 12
    assert all(prompt.text.strip() for prompt in prompts)
