from __future__ import annotations

from collections import Counter
from pathlib import Path

import click
import pytest

from bench import measure as module
from bench.measure import MODES, UnfairRunError, blocks, left_of, measure, order, warm_up
from bench.record import Place
from bench.store import Store
from bench.systems import Job, Outcome
from tests.bench.fakes import HASH, FakeSystem, one_round, question

NAMES = ("a", "b", "c")
ABOUT = {"table": "compare", "settings": {"tokens": 6}}


def test_every_block_has_its_own_order_and_none_is_favoured() -> None:
    systems = [FakeSystem(name) for name in NAMES]
    planned = list(blocks([question(i) for i in range(40)], list(MODES), repeats=2, tokens=6))
    assert len(planned) == len({block.place for block in planned}) == 40 * 3 * 2
    orders = [tuple(system.name for system in order(systems, block.place)) for block in planned]
    assert orders == [tuple(system.name for system in order(systems, block.place)) for block in planned]
    firsts = Counter(names[0] for names in orders)
    assert all(60 <= firsts[name] <= 100 for name in NAMES)
    # Another repeat of the same prompt has another order, as a rule.
    assert len(set(orders)) == 6


async def test_all_systems_get_the_same_jobs_and_repeats_get_other_seeds(tmp_path: Path) -> None:
    systems = [FakeSystem(name) for name in NAMES]
    planned = list(blocks([question(4), question(5)], list(MODES), repeats=2, tokens=6))
    store = Store(tmp_path / "results.jsonl", ABOUT)
    told: list[tuple[Place, str]] = []
    await measure(store, systems, planned, weights_hash=HASH, on_step=lambda *step: told.append(step))
    assert len(store.records) == len(told) == 2 * 2 * 3 * 3
    assert systems[0].jobs == systems[1].jobs == systems[2].jobs
    assert len({(job.seed, job.temperature, job.top_p) for job in systems[0].jobs}) == 12
    assert {(job.temperature, job.top_p) for job in systems[0].jobs} == {(0.0, 1.0), (0.7, 0.9), (1.0, 1.0)}


@pytest.mark.parametrize(
    ("system", "message"),
    [
        (FakeSystem("a", extra_tokens=1), "a wrote 7 tokens, not 6"),
        (FakeSystem("a", weights_hash="cd" * 32), "a uses weights cdcdcdcdcdcd, not abababababab"),
    ],
)
async def test_unequal_work_is_refused(system: FakeSystem, message: str, tmp_path: Path) -> None:
    store = Store(tmp_path / "results.jsonl", ABOUT)
    planned = list(blocks([question()], ["greedy"], repeats=1, tokens=6))
    with pytest.raises(UnfairRunError, match=message):
        await measure(store, [system], planned, weights_hash=HASH, on_step=lambda *_: None)
    assert not store.records


class Stops(FakeSystem):
    """Fails at its n-th answer, as a run that is stopped does."""

    def __init__(self, name: str, at: int) -> None:
        super().__init__(name)
        self._at = at

    async def write(self, job: Job) -> Outcome:
        if len(self.jobs) == self._at:
            raise InterruptedError
        return await super().write(job)


async def test_a_run_that_is_stopped_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    planned = list(blocks([question(i) for i in range(3)], ["greedy"], repeats=2, tokens=6))
    # The second of its block, so that the first has been measured.
    stops = order([FakeSystem("a"), FakeSystem("b")], planned[3].place)[1].name
    before = [Stops(name, at=3) if name == stops else FakeSystem(name) for name in ("a", "b")]
    with pytest.raises(InterruptedError):
        await measure(Store(path, ABOUT), before, planned, weights_hash=HASH, on_step=lambda *_: None)
    with path.open("a") as file:
        file.write('{"place": {"mode": "gre')  # killed in the middle of a line
    store = Store(path, ABOUT)
    systems = [FakeSystem("a"), FakeSystem("b")]
    left = left_of(store, planned, systems)
    # The block that was broken off is run again whole, so that its systems are still neighbours.
    assert [block.place for block in left] == [block.place for block in planned[3:]]
    await measure(store, systems, left, weights_hash=HASH, on_step=lambda *_: None)
    assert len(systems[0].jobs) == len(systems[1].jobs) == 3
    again = Store(path, ABOUT)
    assert not left_of(again, planned, systems)
    assert again.records.keys() == store.records.keys()
    assert len(again.records) == 12


async def test_warming_up_waits_for_the_draft_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(FakeSystem):
        async def write(self, job: Job) -> Outcome:
            self.inside = (one_round(degraded=len(self.jobs) < 2),)
            return await super().write(job)

    late = Late("late")
    seconds = await warm_up([late], question(), ["greedy", "temperature 1"])
    assert len(late.jobs) == 3 + 2
    assert seconds["late"] == pytest.approx(0.1 / 16)
    monkeypatch.setattr(module, "_DRAFT_WAIT_S", 0.0)
    with pytest.raises(click.ClickException, match="never: its draft worker is not used"):
        await warm_up([FakeSystem("never", inside=[one_round(degraded=True)])], question(), ["greedy"])
