"""Gamma where little is known of what a round costs: no request fails for it."""

from __future__ import annotations

from services.common.specdec.types import Decision, Origin
from services.coordinator.gamma import AdaptiveGamma
from services.coordinator.speculation import Speculation
from services.coordinator.types import Call, Round


def done(index: int, proposed: int, target: Call) -> Round:
    """A round that kept no draft."""
    return Round(
        index=index,
        gamma=4,
        proposed=proposed,
        decision=Decision((0,), accepted=0, tested=min(1, proposed), origin=Origin.RESIDUAL),
        tokens=(0,),
        finish=None,
        degraded="",
        draft=Call(elapsed_s=0.01, forward_tokens=4),
        target=target,
        start_s=0.0,
        total_s=target.elapsed_s + 0.01,
        accept_s=0.0,
    )


def test_the_first_passes_were_shared_with_a_prompt() -> None:
    """They say nothing of what drafts cost the target, so only drafting has been timed."""
    gamma = AdaptiveGamma(Speculation(16))
    for index in range(1, 6):
        gamma.observe(done(index, 4, Call(0.05, forward_tokens=5, batch_size=2, pass_tokens=205)))
        assert 0 <= gamma.choose(100) <= 16


def test_a_line_through_few_points_says_that_a_pass_takes_no_time() -> None:
    gamma = AdaptiveGamma(Speculation(16))
    for index, (drafts, seconds) in enumerate([(16, 0.4), (1, 0.016), (1, 0.016)], 1):
        gamma.observe(done(index, drafts, Call(seconds, forward_tokens=drafts + 1, batch_size=1)))
        assert 0 <= gamma.choose(100) <= 16
