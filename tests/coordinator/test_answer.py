"""The answer as it grows: each token is tested for eos, stop ids, stop strings and length, in this order."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from services.common.specdec.types import Origin
from services.coordinator.answer import Answer, Finish, StopRules

EOS, STOP_ID, BOTH = 90, 91, 92


def write(
    texts: Sequence[str | int], *, strings: Sequence[str] = (), max_tokens: int = 100, ignore_eos: bool = False
) -> tuple[Answer, list[list[str]]]:
    """Push tokens until the answer ends; return it and the texts that were decided after each.

    Args:
        texts: The tokens: a text stands for one that has it, a number for itself, without text.
        strings: Stop strings.
        max_tokens: Length.
        ignore_eos: No eos.
    """
    rules = StopRules(
        eos_ids=frozenset() if ignore_eos else frozenset({EOS, BOTH}),
        token_ids=frozenset({STOP_ID, BOTH}),
        strings=tuple(strings),
    )
    ids = [text if isinstance(text, int) else i for i, text in enumerate(texts)]
    decoded = {i: text for i, text in zip(ids, texts, strict=True) if isinstance(text, str)}
    answer = Answer(rules, max_tokens, lambda token: decoded.get(token, ""))
    steps = []
    for token in ids:
        finish = answer.push(token, Origin.TARGET)
        assert finish is answer.finish
        steps.append([piece.text for piece in answer.take()])
        if finish is not None:
            break
    return answer, steps


def joined(steps: Sequence[Sequence[str]]) -> str:
    return "".join(text for step in steps for text in step)


@pytest.mark.parametrize(
    ("texts", "options", "finish", "count", "text"),
    [
        (["a", "b", EOS, "c"], {}, Finish.EOS, 3, "ab"),
        (["a", STOP_ID, "c"], {}, Finish.STOP, 2, "a"),
        (["a", BOTH, "c"], {}, Finish.EOS, 2, "a"),
        (["a", BOTH, "c"], {"ignore_eos": True}, Finish.STOP, 2, "a"),
        (["a", EOS, "c"], {"ignore_eos": True, "max_tokens": 3}, Finish.LENGTH, 3, "ac"),
        (["a", "b", "c"], {"max_tokens": 2}, Finish.LENGTH, 2, "ab"),
        # On the very last token, a stop is named before the length.
        (["a", EOS], {"max_tokens": 2}, Finish.EOS, 2, "a"),
        (["a", STOP_ID], {"max_tokens": 2}, Finish.STOP, 2, "a"),
        (["a", "b"], {"max_tokens": 2, "strings": ["b"]}, Finish.STOP, 2, "a"),
    ],
)
def test_what_ends_an_answer(
    texts: list[str | int], options: dict[str, object], finish: Finish, count: int, text: str
) -> None:
    answer, steps = write(texts, **options)  # type: ignore[arg-type]
    assert (answer.finish, answer.count, joined(steps)) == (finish, count, text)
    assert sum(map(len, steps)) == count


def test_the_length_decides_what_was_held_back() -> None:
    answer, steps = write(["x", "ab", "a"], strings=["abc"], max_tokens=3)
    assert answer.finish is Finish.LENGTH
    assert steps == [["x"], [], ["ab", "a"]]


def test_eos_decides_what_was_held_back() -> None:
    answer, steps = write(["ab", EOS], strings=["abc"])
    assert steps == [[], ["ab", ""]]
    assert answer.stop_string == ""


@pytest.mark.parametrize(
    ("texts", "strings", "stop", "steps"),
    [
        # Across tokens: nothing of it leaves, its tokens do.
        (["x", "a", "b", "c", "y"], ["abc"], "abc", [["x"], [], [], ["", "", ""]]),
        # Within a token, with text before and after.
        (["xyabcd"], ["abc"], "abc", [["xy"]]),
        # A beginning that comes to nothing is let go, whole tokens at a time.
        (["a", "b", "x"], ["abc"], "", [[], [], ["a", "b", "x"]]),
        # A beginning inside a token holds the token back.
        (["xya", "bc"], ["abc"], "abc", [[], ["xy", ""]]),
        # It may begin again within itself.
        (["a", "a", "b"], ["ab"], "ab", [[], ["a"], ["", ""]]),
        (["ab", "ab", "ac"], ["abac"], "abac", [[], ["ab"], ["", ""]]),
        # Of two that a token completes, the one that starts first.
        (["abcd"], ["c", "bcd"], "bcd", [["a"]]),
        # Of two that start together, the longer.
        (["abcd"], ["b", "bc"], "bc", [["a"]]),
        # One that is complete ends the answer although another has begun before it.
        (["a", "b", "c"], ["abcd", "b"], "b", [[], ["a", ""]]),
        # A token without text does not release what is held before it.
        (["a", 7, "b"], ["ab"], "ab", [[], [], ["", "", ""]]),
        (["x", 7, "y"], ["ab"], "", [["x"], [""], ["y"]]),
    ],
)
def test_stop_strings(texts: list[str | int], strings: list[str], stop: str, steps: list[list[str]]) -> None:
    answer, seen = write(texts, strings=strings)
    assert seen == steps
    assert answer.stop_string == stop
    assert (answer.finish is Finish.STOP) == bool(stop)


@pytest.mark.parametrize("seed", range(100))
def test_stop_strings_at_random(seed: int) -> None:
    """Against a reference that looks at the whole text: where it ends, what leaves, nothing held in vain."""
    rng = random.Random(seed)

    def word(most: int, least: int = 0) -> str:
        return "".join(rng.choices("ab", k=rng.randint(least, most)))

    stops = [word(4, 1) for _ in range(rng.randint(1, 3))]
    stops = [stop + rng.choice(("", "c")) for stop in stops]
    texts: list[str | int] = [word(3) + rng.choice(("", "", "c")) for _ in range(12)]
    answer, steps = write(texts, strings=stops)

    text, given = "", 0
    for i, added in enumerate(texts):
        text += str(added)
        hits = [(text.index(stop), -len(stop), stop) for stop in stops if stop in text]
        sent = "".join(piece for step in steps[: i + 1] for piece in step)
        given += len(steps[i])
        if hits:
            assert answer.finish is Finish.STOP
            assert (answer.count, answer.stop_string) == (i + 1, min(hits)[2])
            assert sent == text[: min(hits)[0]]
            assert given == i + 1
            return
        opened = max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
        # Whole tokens only: as many as lie before what may begin a stop string.
        ends = [len("".join(map(str, texts[:n]))) for n in range(i + 2)]
        assert given == max(n for n, end in enumerate(ends) if end <= len(text) - opened)
    assert answer.finish is None
