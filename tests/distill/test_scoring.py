"""A draft's worth on answers, against the two models' whole distributions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.common.engine.model import LoadedModel
from services.distill.chat import question
from services.distill.scoring import MODES, Answer, answers, worth
from services.distill.unrolled import unroll
from tests.distill.teaching import FEATURES, HEAD, draft_of
from tests.support.engines import Library, engines

STEPS = 3
ANSWER = Answer((5, 80, 13, 44, 9, 200, 31, 7, 66, 12), begins=4)


def q_rows(target: LoadedModel, features: tuple[int, ...], step: int) -> torch.Tensor:
    """Return q after each token, over the vocabulary: float32[positions, 320]."""
    draft = draft_of(target, features)
    tokens = torch.tensor([ANSWER.tokens])
    hidden = target.model.model(tokens, output_hidden_states=True, use_cache=False)
    known = torch.cat([*(hidden.hidden_states[layer] for layer in (1, 2)), hidden.last_hidden_state], -1)
    states = list(unroll(draft, tokens, known if features else None, STEPS))
    a = states[step if features else 0][1][0]
    q = torch.zeros(len(ANSWER.tokens), 320)
    q[:, :HEAD] = torch.softmax(a @ draft.head.T, -1)
    return q


@torch.no_grad()
@pytest.mark.parametrize("features", [FEATURES, ()], ids=["hidden", "tokens"])
def test_worth_is_the_sum_of_min_p_q_over_the_answers_positions(target: LoadedModel, features: tuple[int, ...]) -> None:
    logits = target.model(torch.tensor([ANSWER.tokens]), use_cache=False).logits[0]
    p = torch.softmax(logits, -1)
    sampled = worth(target, draft_of(target, features), ANSWER, greedy=False, steps=STEPS, top_ks=(2, 1000))
    greedy = worth(target, draft_of(target, features), ANSWER, greedy=True, steps=STEPS, top_ks=())
    for step in range(STEPS):
        # Step 1 may choose the answer's first token, step s its s-th; the last token chooses none that was written.
        at = slice(ANSWER.begins - 1 + (step if features else 0), len(ANSWER.tokens) - 1)
        q = q_rows(target, features, step)[at]
        assert sampled.counts[step] == len(q)
        assert sampled.alphas[step] == pytest.approx(float(torch.minimum(p[at], q).sum(-1).mean()), abs=1e-5)
        cut = torch.where(q >= torch.topk(q, 2).values[:, -1:], q, 0)
        cut /= cut.sum(-1, keepdim=True)
        expected = float(torch.minimum(p[at], cut).sum(-1).mean())
        assert sampled.alphas_at(2)[step] == pytest.approx(expected, abs=1e-5)
        assert sampled.alphas_at(1000)[step] == pytest.approx(sampled.alphas[step], abs=1e-6)
        same = (q.argmax(-1) == p[at].argmax(-1)).float().mean()
        assert greedy.alphas[step] == pytest.approx(float(same), abs=1e-6)


async def test_answers_are_the_targets_own_and_do_not_depend_on_the_batch(folder: Path, target: LoadedModel) -> None:
    library = Library(folder)
    questions = [question(target, text) for text in ("Hi", "What?", "And then?")]
    told = []
    for batch in (1, 3):
        async with engines() as start:
            engine = await start(folder)
            arguments = {"tokens": 8, "ends": (1,), "seed": 4, "batch": batch}
            greedy = await answers(engine, questions, MODES["greedy"], **arguments)
            told.append((greedy, await answers(engine, questions, MODES["temperature 1"], **arguments)))
    assert told[0] == told[1]
    for asked, answer in zip(questions, told[0][0], strict=True):
        assert answer.tokens[: answer.begins] == tuple(asked)
        for at in range(answer.begins, len(answer.tokens)):
            logits = library.logits(answer.tokens[:at], 1)[0]
            assert float(logits.max() - logits[answer.tokens[at]]) < 1e-4
        assert len(answer.tokens) == answer.begins + 8 or answer.tokens[-1] == 1
