"""Temperature 1 on the real model: the first token's law, and a smoke test of the dtype that `auto` picks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import worker_pb2
from tests.real_model.reference import Reference
from tests.real_model.serving import Serving
from tests.support.processes import Processes

SAMPLED = worker_pb2.SamplingParams(temperature=1.0)
SEEDS = 300
# Its end occurred before, so n-gram lookup drafts what followed there.
PROMPT = "The cat sat on the mat. The dog sat on the"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("drafter", ["ngram", "noisy"])
def test_the_first_token_has_the_law_of_the_model(drafter: str, serving: Serving, reference: Reference) -> None:
    def draw(seed: int) -> pb.GenerateResult:
        # Two tokens: an answer of one has no room for a draft.
        reply = coordinator.generate(
            text=PROMPT, gamma=2, max_tokens=2, seed=seed, sampling=SAMPLED, stop={"ignore_eos": True}
        )
        first.append(reply.tokens[0])
        return reply.result

    coordinator = serving.coordinator(drafter)
    first: list[int] = []
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(draw, range(SEEDS)))
    tested = sum(result.speculation.tested for result in results)
    accepted = sum(result.speculation.accepted for result in results)
    assert tested == SEEDS, "the first token of each answer was drafted"
    # Both branches of the rule have made tokens.
    assert 0.1 * SEEDS <= accepted <= 0.9 * SEEDS
    assert p_value(first, softmax(reference.logits(list(results[0].prompt_token_ids)))) > 1e-4


def test_the_dtype_that_auto_picks_serves(default_model_dir: Path, tmp_path: Path, reference: Reference) -> None:
    with Processes(tmp_path) as processes:
        coordinator = processes.coordinator(processes.target("--model", str(default_model_dir)), processes.draft())
        reply = coordinator.generate(
            text=PROMPT, gamma=3, max_tokens=16, seed=5, sampling=SAMPLED, stop={"ignore_eos": True}
        )
    assert reply.result.target.dtype in ("bfloat16", "float32")
    assert len(reply.tokens) == 16
    # Rounding moves the tokens, and the law only a little: the float32 model would have written such a text. Its own
    # samples have about 3 nats a token here, tokens drawn evenly from the vocabulary 11 and more.
    assert reference.surprise(list(reply.result.prompt_token_ids), reply.tokens) < 6


def softmax(scores: np.ndarray) -> np.ndarray:
    """Return the distribution: float64[vocab]."""
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def p_value(drawn: list[int], law: np.ndarray) -> float:
    """Return how likely counts as far off as these are, of the tokens expected 5 times or more, and of the rest."""
    counts = np.bincount(drawn, minlength=len(law))
    common = np.flatnonzero(law * len(drawn) >= 5)
    observed = np.append(counts[common], len(drawn) - counts[common].sum())
    expected = len(drawn) * np.append(law[common], 1 - law[common].sum())
    assert len(common) >= 5
    assert expected[-1] >= 5
    return float(stats.chisquare(observed, expected).pvalue)
