"""The contract of Generate, over real gRPC with scripted workers: what is streamed, and what the result says."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import worker_pb2
from services.common.specdec.types import SamplingParams
from tests.support.cluster import Cluster, Reply, scripted_cluster
from tests.support.laws import Law, close_law
from tests.support.tokenizers import letter_tokenizer

PROMPT = [0, 1]
LETTERS = 6
GREEDY = SamplingParams(temperature=0)


def far_law() -> Law:
    """Return tables whose drafts are kept about half of the time."""
    return close_law(distance=1.5, spread=1.0, seed=3, vocab_size=LETTERS)


def same_law() -> Law:
    """Return tables whose drafts are all kept."""
    return close_law(distance=0.0, spread=1.0, seed=3, vocab_size=LETTERS)


def text_of(tokens: Sequence[int]) -> str:
    return str(letter_tokenizer(LETTERS).decode(tokens))


def stop(**conditions: Any) -> dict[str, Any]:
    return {"stop": pb.StopConditions(**{"ignore_eos": True, **conditions})}


@pytest.mark.parametrize("gamma", [0, 1, 4])
async def test_chunks_join_to_the_answer(gamma: int) -> None:
    async with scripted_cluster(far_law()) as cluster:
        reply = await cluster.generate(PROMPT, gamma=gamma, max_tokens=40, seed=5)
    assert len(reply.tokens) == reply.result.usage.completion_tokens == 40
    assert reply.text == text_of(reply.tokens)
    assert all(chunk.tokens for chunk in reply.chunks)
    for chunk in reply.chunks:
        assert chunk.text == "".join(token.text for token in chunk.tokens)
    assert reply.result.finish_reason == pb.FINISH_REASON_LENGTH
    assert reply.result.usage.prompt_tokens == len(PROMPT)
    assert reply.result.prompt_token_ids == PROMPT


async def test_every_token_says_where_it_came_from() -> None:
    async with scripted_cluster(far_law()) as cluster:
        reply = await cluster.generate(PROMPT, gamma=3, max_tokens=60, seed=1)
        alone = await cluster.generate(PROMPT, gamma=0, max_tokens=5, seed=1)
    origins = iter(reply.origins)
    kinds = set()
    for done in reply.result.speculation.per_round:
        expected = [pb.TOKEN_ORIGIN_ACCEPTED_DRAFT] * done.accepted
        if done.proposed == 0:
            expected.append(pb.TOKEN_ORIGIN_TARGET)
        elif done.accepted == done.proposed:
            expected.append(pb.TOKEN_ORIGIN_BONUS)
        else:
            expected.append(pb.TOKEN_ORIGIN_RESIDUAL)
        expected = expected[: done.emitted]
        assert [next(origins) for _ in expected] == expected
        kinds |= set(expected)
    assert next(origins, None) is None
    assert {pb.TOKEN_ORIGIN_ACCEPTED_DRAFT, pb.TOKEN_ORIGIN_BONUS, pb.TOKEN_ORIGIN_RESIDUAL} <= kinds
    assert set(alone.origins) == {pb.TOKEN_ORIGIN_TARGET}


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 8, 9, 10])
async def test_exactly_max_tokens_when_every_draft_is_kept(max_tokens: int) -> None:
    async with scripted_cluster(same_law()) as cluster:
        reply = await cluster.generate(PROMPT, gamma=8, max_tokens=max_tokens, seed=2)
    assert len(reply.tokens) == max_tokens == reply.result.usage.completion_tokens
    assert reply.result.speculation.emitted == max_tokens
    assert reply.result.speculation.alpha == (1.0 if max_tokens > 1 else 0.0)
    assert reply.result.finish_reason == pb.FINISH_REASON_LENGTH
    # Drafts that could not be used are not asked for.
    assert reply.result.speculation.per_round[0].gamma == min(8, max_tokens - 1)


@pytest.mark.parametrize("gamma", [0, 3, 8])
async def test_nothing_leaves_after_a_stop(gamma: int) -> None:
    """Eos, a stop token and a stop string at every place of a round: text, tokens and usage end with the first hit."""
    async with scripted_cluster(same_law(), eos_ids=[2]) as cluster:
        for seed in range(6):
            free = await cluster.generate(PROMPT, gamma=gamma, max_tokens=24, seed=seed)
            text = free.text
            cases: list[tuple[dict[str, Any], int, str, int]] = []
            if 2 in free.tokens:
                end = free.tokens.index(2) + 1
                cases.append((stop(ignore_eos=False), end, text[: end - 1], pb.FINISH_REASON_EOS))
            end = free.tokens.index(free.tokens[7]) + 1
            cases.append((stop(token_ids=[free.tokens[7]]), end, text[: end - 1], pb.FINISH_REASON_STOP))
            at = text.index(text[5:8])
            cases.append((stop(strings=[text[5:8]]), at + 3, text[:at], pb.FINISH_REASON_STOP))
            for fields, count, expected, reason in cases:
                reply = await cluster.generate(PROMPT, gamma=gamma, max_tokens=24, seed=seed, **fields)
                assert reply.tokens == free.tokens[:count]
                assert reply.text == expected
                assert reply.result.finish_reason == reason
                assert reply.result.usage.completion_tokens == reply.result.speculation.emitted == count
                assert reply.result.stop_string == "".join(fields["stop"].strings)


async def test_a_stop_token_has_no_text_and_an_ignored_eos_is_a_token_like_any_other() -> None:
    async with scripted_cluster(same_law(), eos_ids=[2]) as cluster:
        free = await cluster.generate(PROMPT, gamma=3, max_tokens=40)
        assert 2 in free.tokens[:-1]
        assert free.text.count("c") == free.tokens.count(2)
        stopped = await cluster.generate(PROMPT, gamma=3, max_tokens=40, **stop(token_ids=[2]))
        assert stopped.tokens == free.tokens[: free.tokens.index(2) + 1]
        assert stopped.result.finish_reason == pb.FINISH_REASON_STOP
    last = stopped.chunks[-1].tokens[-1]
    assert (last.id, last.text) == (2, "")


async def test_text_that_may_begin_a_stop_string_is_held_back_across_rounds() -> None:
    async with scripted_cluster(same_law()) as cluster:
        free = await cluster.generate(PROMPT, gamma=1, max_tokens=30, seed=4)
        # Of many tokens, so that it lies across several rounds of two; its end never comes.
        never = free.text[4:12] + "zz"
        held = await cluster.generate(PROMPT, gamma=1, max_tokens=30, seed=4, **stop(strings=[never]))
        across = await cluster.generate(PROMPT, gamma=1, max_tokens=30, seed=4, **stop(strings=[free.text[4:12]]))
    assert held.text == free.text
    assert held.tokens == free.tokens
    # Nothing of the eight letters left before the round that decided them.
    begun = len(across.text)
    assert max(len(chunk.tokens) for chunk in held.chunks) >= 8
    assert across.text == free.text[:begun]
    assert free.text[begun:].startswith(free.text[4:12])
    assert across.result.finish_reason == pb.FINISH_REASON_STOP


async def test_an_unseeded_run_can_be_repeated() -> None:
    async with scripted_cluster(far_law(), default_gamma=3, adaptive_gamma=False) as cluster:
        fields = {"max_tokens": 30, "stop": pb.StopConditions(ignore_eos=True)}
        request = pb.GenerateRequest(tokens=pb.TokenPrompt(ids=PROMPT), **fields)
        first = await collect(cluster, request)
        other = await collect(cluster, request)
        assert first.result.gamma == 3
        assert first.result.seed != other.result.seed
        assert first.tokens != other.tokens
        request.seed, request.gamma = first.result.seed, first.result.gamma
        request.verification = first.result.verification
        request.sampling.CopyFrom(first.result.sampling)
        request.max_tokens = first.result.max_tokens
        again = await collect(cluster, request)
    assert again.chunks == first.chunks
    assert again.result.seed == first.result.seed


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
async def test_a_seed_is_used_and_returned(seed: int) -> None:
    async with scripted_cluster(far_law()) as cluster:
        first = await cluster.generate(PROMPT, gamma=2, seed=seed, max_tokens=20)
        again = await cluster.generate(PROMPT, gamma=2, seed=seed, max_tokens=20)
    assert first.tokens == again.tokens
    assert first.result.seed == seed


async def test_what_was_used_is_returned() -> None:
    params = SamplingParams(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1)
    async with scripted_cluster(far_law()) as cluster:
        reply = await cluster.generate(PROMPT, gamma=2, params=params, max_tokens=7)
        plain = await collect(cluster, pb.GenerateRequest(tokens=pb.TokenPrompt(ids=PROMPT), max_tokens=3))
    used = reply.result.sampling
    assert (used.temperature, used.top_k, used.top_p, used.min_p) == (0.5, 3, 0.9, 0.1)
    assert plain.result.sampling == worker_pb2.SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    assert (reply.result.gamma, reply.result.max_tokens) == (2, 7)
    assert reply.result.target == cluster.target.info.identity
    assert reply.result.trace_id == ""


@pytest.mark.parametrize("given", ["", "mine", "x" * 128, "with spaces ~!"])
async def test_a_request_id_comes_back_early_and_late(given: str) -> None:
    async with scripted_cluster(far_law()) as cluster:
        call = cluster.stub.Generate(
            pb.GenerateRequest(request_id=given, tokens=pb.TokenPrompt(ids=PROMPT), max_tokens=3)
        )
        metadata = dict(await call.initial_metadata())
        items = [item async for item in call]
    request_id = items[-1].result.request_id
    assert request_id
    assert request_id == given or not given
    assert metadata["paceline-request-id"] == request_id


async def test_the_rows_of_the_rounds_add_up() -> None:
    async with scripted_cluster(far_law()) as cluster:
        reply = await cluster.generate(PROMPT, gamma=3, max_tokens=50, seed=9)
    stats, rows = reply.result.speculation, reply.result.speculation.per_round
    assert stats.rounds == len(rows)
    assert [row.index for row in rows] == sorted({row.index for row in rows})
    for name in ("proposed", "tested", "accepted", "emitted"):
        assert getattr(stats, name) == sum(getattr(row, name) for row in rows)
    assert stats.emitted == 50
    assert stats.alpha == pytest.approx(stats.accepted / stats.tested)
    assert stats.tokens_per_round == pytest.approx(50 / stats.rounds)
    assert stats.degraded_rounds == 0
    for row in rows[:-1]:
        assert row.emitted == row.accepted + 1
    for row in rows:
        assert row.gamma >= row.proposed >= row.tested >= row.accepted
        assert row.tested - row.accepted in (0, 1)
        assert row.p_bytes == (row.proposed + 1) * LETTERS * 4
        assert row.q_bytes == row.proposed * LETTERS * 4
        assert row.wire_ms >= 0
        assert row.draft_ms + row.verify_ms + row.accept_ms <= row.total_ms
        assert row.draft.service_ms <= row.draft_ms
        assert row.target.service_ms <= row.verify_ms
    starts = [row.start_ms for row in rows]
    assert starts == sorted(starts)
    assert all(a.start_ms + a.total_ms <= b.start_ms for a, b in itertools.pairwise(rows))


async def test_a_last_round_says_how_much_of_it_left() -> None:
    """A stop in the middle of a round: `emitted` counts what left, `accepted` what the rule kept."""
    async with scripted_cluster(same_law()) as cluster:
        free = await cluster.generate(PROMPT, gamma=8, max_tokens=20)
        stopped = await cluster.generate(PROMPT, gamma=8, max_tokens=20, **stop(strings=[free.text[:4]]))
    (only,) = stopped.result.speculation.per_round
    assert (only.accepted, only.emitted) == (8, 4)
    assert stopped.result.usage.completion_tokens == 4


async def test_caches_are_not_recomputed() -> None:
    """What both workers feed: the prompt once, then what each round adds, full acceptance and rejections included."""
    prompt = [0, 1] * 20
    for law in (same_law(), far_law()):
        async with scripted_cluster(law) as cluster:
            reply = await cluster.generate(prompt, gamma=3, max_tokens=41, seed=3)
            rows = reply.result.speculation.per_round
            fed = sum(row.target.forward_tokens for row in rows)
            assert cluster.target.forward_tokens == fed == len(prompt) + sum(row.proposed + 1 for row in rows) - 1
            # The draft does not feed its last draft, which its next round begins with if it was kept.
            drafted = sum(row.draft.forward_tokens for row in rows)
            kept = sum(row.proposed + (row.accepted == row.proposed) for row in rows if row.proposed)
            assert cluster.draft.forward_tokens == drafted <= len(prompt) + kept


async def test_the_default_length_is_a_setting() -> None:
    request = pb.GenerateRequest(tokens=pb.TokenPrompt(ids=PROMPT))
    async with scripted_cluster(far_law(), default_max_tokens=7) as cluster:
        reply = await collect(cluster, request)
        assert (reply.result.max_tokens, len(reply.tokens)) == (7, 7)
    async with scripted_cluster(far_law(), default_max_tokens=7, context_length=6) as cluster:
        reply = await collect(cluster, request)
    assert (reply.result.max_tokens, len(reply.tokens)) == (4, 4)


async def test_an_answer_may_fill_the_context() -> None:
    async with scripted_cluster(same_law(), context_length=20, draft_context_length=20) as cluster:
        reply = await cluster.generate(PROMPT, gamma=8, max_tokens=18)
    assert len(reply.tokens) == 18


async def test_a_draft_with_a_shorter_context_drops_out_where_it_ends() -> None:
    async with scripted_cluster(same_law(), draft_context_length=10) as cluster:
        short = await cluster.generate(PROMPT, gamma=3, max_tokens=30, seed=1)
    rows = short.result.speculation.per_round
    assert len(short.tokens) == 30
    assert rows[0].proposed == 3
    assert rows[-1].proposed == 0
    assert rows[-2].degraded


async def test_prompts_of_every_kind() -> None:
    async with scripted_cluster(far_law()) as cluster:
        fields = {"seed": 3, "gamma": 2, "max_tokens": 10}
        replies = [
            await collect(cluster, pb.GenerateRequest(text="ab", **fields)),
            await collect(cluster, pb.GenerateRequest(tokens=pb.TokenPrompt(ids=PROMPT), **fields)),
            await collect(
                cluster,
                pb.GenerateRequest(
                    chat=pb.ChatPrompt(
                        messages=[
                            pb.ChatMessage(role=pb.ROLE_SYSTEM, content="a"),
                            pb.ChatMessage(role=pb.ROLE_USER, content="b"),
                        ]
                    ),
                    **fields,
                ),
            ),
        ]
    assert all(reply.result.prompt_token_ids == PROMPT for reply in replies)
    assert replies[0].tokens == replies[1].tokens == replies[2].tokens


async def test_greedy_takes_no_random_numbers() -> None:
    async with scripted_cluster(far_law()) as cluster:
        answers = [
            (await cluster.generate(PROMPT, gamma=gamma, seed=seed, params=GREEDY, max_tokens=30)).tokens
            for gamma, seed in [(0, 1), (0, 2), (3, 3), (8, 4)]
        ]
    assert all(answer == answers[0] for answer in answers)


async def collect(cluster: Cluster, request: pb.GenerateRequest) -> Reply:
    """Send a request as it is."""
    call = cluster.stub.Generate(request, timeout=60)
    items = [item async for item in call]
    assert await call.code() is grpc.StatusCode.OK
    assert [item.WhichOneof("item") for item in items[-1:]] == ["result"]
    return Reply(tuple(item.chunk for item in items[:-1]), items[-1].result)
