"""Rounds without a service: drafts and clocks of a known law, for what chooses gamma.

Assumed: draft i is kept with a probability of its own given that those before it were; n drafts take a + b n seconds; a
pass of the target is a function of all the positions in it; sessions that share a pass go in step. Measured times are
the true ones times log-normal noise, and one in a hundred is five times as long. A draft may know how likely each of
its tokens is to be kept, and then stops as it is asked to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from services.common.specdec.types import Decision, Origin
from services.coordinator.gamma import AdaptiveGamma
from services.coordinator.speculation import Speculation
from services.coordinator.types import Call, Round

Keep = Callable[[int], float]


def done(gamma: int, accepted: int, **fields: object) -> Round:
    """Return a round that is over, with so many of its drafts kept."""
    decision = Decision((0,) * (accepted + 1), accepted, min(accepted + 1, gamma), Origin.RESIDUAL)
    values = {
        "index": 1,
        "gamma": gamma,
        "proposed": gamma,
        "decision": decision,
        "tokens": decision.tokens,
        "finish": None,
        "degraded": "",
        "draft": Call(elapsed_s=0.01 * gamma),
        "target": Call(elapsed_s=0.02, batch_size=1, pass_tokens=gamma + 1),
        "start_s": 0.0,
        "total_s": 0.02 + 0.01 * gamma,
        "accept_s": 0.0,
    }
    return Round(**(values | fields))  # type: ignore[arg-type]


@dataclass
class World:
    """What is true, and may be changed between two rounds.

    Attributes:
        keep: Probability that the draft at an offset (from 0) is kept.
        draft_s: Of one draft.
        asking_s: Of asking for drafts, however many.
        pass_s: Of a pass, by its sessions and its positions.
        own_s: Of the rest of a round.
        comes: Probability that a drafter has a guess; then it gives all that it is asked for.
        jitter: Standard deviation of the logarithm of measured times.
        outliers: Share of times that are five times as long.
        late_s: Where drafts take longer than this, the round goes on without them.
        certainty: How much drafts differ: each is kept with a probability of its own from a beta distribution about
            `keep`, the narrower the larger this is. The draft knows it. None for no difference.
    """

    keep: Keep
    draft_s: float
    pass_s: Callable[[int, int], float]
    asking_s: float = 0.001
    own_s: float = 0.0005
    comes: float = 1.0
    jitter: float = 0.15
    outliers: float = 0.01
    late_s: float = 10.0
    certainty: float | None = None

    def drafted(self, gamma: int, stop_below: float, rng: np.random.Generator) -> list[float]:
        """Return with what probability each of the drafts that come will be kept."""
        if not gamma or rng.random() >= self.comes:
            return []
        if self.certainty is None:
            return [self.keep(i) for i in range(gamma)]
        kept: list[float] = []
        reached = 1.0
        # The first is always sampled.
        while len(kept) < gamma and (not kept or reached * self.keep(len(kept)) >= stop_below):
            mean = self.keep(len(kept))
            kept.append(float(rng.beta(mean * self.certainty, (1 - mean) * self.certainty)))
            reached *= kept[-1]
        return kept

    def tokens(self, gamma: int) -> float:
        """Return the expected tokens of a round."""
        return 1 + self.comes * float(np.cumprod([self.keep(i) for i in range(gamma)]).sum())

    def seconds(self, gammas: Sequence[int], drafts: Sequence[float] | None = None) -> float:
        """Return the expected seconds of a round in which sessions ask for these gammas, and get so many drafts."""
        came = [self.comes * gamma for gamma in gammas] if drafts is None else drafts
        drafting = max(self.asking_s + n * self.draft_s if g else 0.0 for g, n in zip(gammas, came, strict=True))
        return drafting + self.pass_s(len(gammas), round(len(gammas) + sum(came))) + self.own_s

    def pace(self, gamma: int, sessions: int = 1) -> float:
        """Return the expected tokens a second of a session, where all ask for the same."""
        return self.tokens(gamma) / self.seconds([gamma] * sessions)

    def best(self, most: int, sessions: int = 1) -> float:
        """Return the pace of the best fixed gamma."""
        return max(self.pace(gamma, sessions) for gamma in range(most + 1))


@dataclass
class Simulation:
    """Sessions of one service that go in step.

    Attributes:
        world: What is true.
        sessions: How many.
        most: Largest gamma.
        seed: Of the noise and of what is kept.
        tokens: Of all rounds so far.
        seconds: That they took, but for the noise.
    """

    world: World
    sessions: int = 1
    most: int = 16
    seed: int = 0
    policies: list[AdaptiveGamma] = field(init=False)
    rng: np.random.Generator = field(init=False)
    index: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.speculation = Speculation(self.most)
        self.policies = [AdaptiveGamma(self.speculation) for _ in range(self.sessions)]
        self.rng = np.random.default_rng(self.seed)

    def step(self) -> list[int]:
        """Run a round of every session; return the gammas."""
        gammas = [policy.choose(10**6) for policy in self.policies[: self.sessions]]
        policies = self.policies[: self.sessions]
        come = [self.world.drafted(g, p.stop_below, self.rng) for g, p in zip(gammas, policies, strict=True)]
        positions = len(gammas) + sum(map(len, come))
        pass_s = self._measured(self.world.pass_s(len(gammas), positions))
        own_s = self._measured(self.world.own_s)
        # In step: the slowest draft is waited for by all, as the pass begins when all have come.
        for policy, gamma, kept in zip(policies, gammas, come, strict=True):
            proposed = len(kept)
            draft_s = self._measured(self.world.asking_s + proposed * self.world.draft_s) if gamma else 0.0
            degraded = ""
            if draft_s > self.world.late_s:
                draft_s, proposed, degraded = self.world.late_s, 0, "draft late"
            accepted = 0
            while accepted < proposed and self.rng.random() < kept[accepted]:
                accepted += 1
            self.tokens += accepted + 1
            origin = Origin.RESIDUAL if accepted < proposed else Origin.BONUS if proposed else Origin.TARGET
            decision = Decision((0,) * (accepted + 1), accepted, min(accepted + 1, proposed), origin)
            policy.observe(
                Round(
                    index=self.index,
                    gamma=gamma,
                    proposed=proposed,
                    decision=decision,
                    tokens=decision.tokens,
                    finish=None,
                    degraded=degraded,
                    draft=Call(elapsed_s=draft_s, forward_tokens=proposed + 1),
                    target=Call(
                        elapsed_s=pass_s, forward_tokens=proposed + 1, batch_size=len(gammas), pass_tokens=positions
                    ),
                    start_s=0.0,
                    total_s=draft_s + pass_s + own_s,
                    accept_s=own_s,
                )
            )
        drafts = [len(kept) for kept in come]
        self.seconds += self.world.seconds(gammas, drafts)
        self.index += 1
        return gammas

    def run(self, rounds: int) -> list[list[int]]:
        """Run rounds; return the gammas of each."""
        return [self.step() for _ in range(rounds)]

    def share_of_best(self, chosen: Sequence[Sequence[int]]) -> float:
        """Return the expected tokens a second of what was chosen, over that of the best fixed gamma."""
        tokens = sum(self.world.tokens(gamma) for gammas in chosen for gamma in gammas)
        seconds = sum(self.world.seconds(gammas) for gammas in chosen)
        return tokens / seconds / len(chosen[0]) / self.world.best(self.most, len(chosen[0])) if chosen else 0.0

    def _measured(self, seconds: float) -> float:
        factor = float(np.exp(self.world.jitter * self.rng.standard_normal()))
        return seconds * factor * (5.0 if self.rng.random() < self.world.outliers else 1.0)
