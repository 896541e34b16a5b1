"""The n-gram drafter."""

from __future__ import annotations

import subprocess
import sys
from array import array

import pytest

from services.common.specdec.errors import CapacityError, UnknownPrefixError
from services.common.specdec.types import Draft, SamplingParams
from services.draft_worker.ngram import NgramProposer, NgramSession, continuation
from services.draft_worker.proposer import ProposalRequest, SessionRequest


def found(text: str, count: int = 3, min_ngram: int = 2, max_ngram: int = 4) -> str:
    tokens = continuation(array("I", list(text.encode())), count, min_ngram, max_ngram)
    return bytes(tokens).decode()


def test_what_followed_the_last_tokens() -> None:
    assert found("the cat sat. the c") == "at "
    assert found("the cat sat. the c", count=8) == "at sat. "
    assert found("the cat sat. the c", count=1) == "a"
    assert found("the cat sat. the c", count=0) == ""


def test_nothing_found() -> None:
    assert found("abcdef") == ""
    assert found("") == ""
    assert found("a") == ""
    assert found("aXbXcY") == "", "the last token is new"
    assert found("abXcb") == "", "one token is too little"
    assert found("abXcb", min_ngram=1) == "Xcb"


def test_the_longest_match_wins_over_the_most_recent() -> None:
    assert found("wxyzA yzB wxyz", count=1) == "A"
    assert found("wxyzA yzB wxyz", count=1, max_ngram=2) == "B"


def test_of_equally_long_matches_the_most_recent_wins() -> None:
    assert found("xyA xyB xy", count=1) == "B"


def test_a_match_at_the_very_start() -> None:
    assert found("abcab", count=1) == "c"
    assert found("abcdZabcd", count=1) == "Z"


def test_text_that_runs_in_circles_goes_on() -> None:
    assert found("xaaa", count=5) == "aaaaa"
    assert found("xabab", count=5) == "ababa"


async def propose(session: NgramSession, base_length: int, text: str, gamma: int) -> str:
    drafts: list[Draft] = []
    async for group in session.propose(ProposalRequest(0, base_length, text.encode(), gamma)):
        drafts.extend(group)
    for draft in drafts:
        assert draft.q.weight(draft.token) == 1.0
    return bytes(draft.token for draft in drafts).decode()


async def open_session() -> NgramSession:
    return await NgramProposer().open(
        SessionRequest(SamplingParams(), seed=0, prompt_length=10_000, max_new_tokens=10_000)
    )


async def test_a_session_over_rounds() -> None:
    session = await open_session()
    assert await propose(session, 0, "abcdefgh ab", 3) == "cde"
    # All kept, and the bonus token: its own drafts count.
    assert await propose(session, 14, "f", 2) == "gh"
    # None kept.
    assert await propose(session, 15, "X", 2) == ""
    assert await propose(session, 16, "bc", 2) == "de"


async def test_dropped_tokens_are_never_found_again() -> None:
    session = await open_session()
    assert await propose(session, 0, "xyQ", 1) == ""
    assert await propose(session, 2, "R..xy", 1) == "R"


async def test_no_matches_and_no_drafts_wanted() -> None:
    session = await open_session()
    assert await propose(session, 0, "abab", 0) == ""
    assert await propose(session, 4, "ab", 2) == "ab"


async def test_no_more_than_was_reserved_is_proposed() -> None:
    session = await NgramProposer().open(SessionRequest(SamplingParams(), seed=0, prompt_length=4, max_new_tokens=2))
    assert await propose(session, 0, "abab", 2**32 - 1) == "ab"


async def test_an_unknown_prefix_changes_nothing() -> None:
    session = await open_session()
    assert await propose(session, 0, "abXab", 1) == "X"
    with pytest.raises(UnknownPrefixError) as caught:
        await propose(session, 7, "a", 1)
    assert caught.value.known_length == 6
    assert await propose(session, 6, "ab", 1) == "X"


async def test_sessions_are_limited_and_freed() -> None:
    proposer = NgramProposer(max_sessions=2)
    first, _ = [await proposer.open(SessionRequest(SamplingParams(), 0, 1, 1)) for _ in range(2)]
    with pytest.raises(CapacityError, match="all 2 sessions"):
        await proposer.open(SessionRequest(SamplingParams(), 0, 1, 1))
    first.close()
    first.close()
    assert proposer.sessions_open == 1
    await proposer.open(SessionRequest(SamplingParams(), 0, 1, 1))


def test_it_runs_without_torch() -> None:
    code = "import sys; import services.draft_worker.app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
