"""Incremental decoding: whole characters only, and joined they are what decoding everything at once gives."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer

from services.coordinator.detokenizer import Detokenizer
from services.coordinator.text import TextCodec
from tests.coordinator.vocabularies import CORPUS, KINDS, SPECIALS, byte_level, legacy_llama, metaspace

HALF = "\ufffd"
TEXTS = (*CORPUS, "unseen: Ωμέγα Ж 𝄞 ☃ 🦄🦓 naïve", "é" * 20, "🦄" * 7, "a" + "🦄" * 3 + "b")


def codec(tokenizer: Tokenizer) -> TextCodec:
    return TextCodec(tokenizer.to_str().encode(), "", {})


def stream(tokenizer: Tokenizer, prompt: Sequence[int], answer: Sequence[int]) -> list[str]:
    """Return the text that each token of an answer adds."""
    detokenizer = codec(tokenizer).detokenizer(prompt)
    return [detokenizer.push(token) for token in answer]


def whole_characters(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text of some tokens up to the last whole character."""
    if tokenizer is byte_level():
        return tokenizer.decode(ids).rstrip(HALF)
    # With a fallback to bytes, half a character spoils those before it, and a token is one byte at most.
    return next(text for n in range(len(ids), -1, -1) if HALF not in (text := tokenizer.decode(ids[:n])))


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_continues_its_prompt_wherever_it_is_cut(kind: str) -> None:
    tokenizer = KINDS[kind]()
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        for cut in range(1, len(ids)):
            added = stream(tokenizer, ids[:cut], ids[cut:])
            before = whole_characters(tokenizer, ids[:cut])
            assert before + "".join(added) == tokenizer.decode(ids)
            assert not any(HALF in piece for piece in added)


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_join_to_the_whole_decode_less_what_is_undecided(seed: int) -> None:
    tokenizer = byte_level()
    rng = random.Random(seed)
    ids = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(300)]
    prompt, answer = [tokenizer.token_to_id("a")], ids
    joined = "a" + "".join(stream(tokenizer, prompt, answer))
    whole = tokenizer.decode(prompt + answer, skip_special_tokens=True)
    assert whole.startswith(joined)
    # What is missing could still become a character: at most three bytes.
    assert set(whole[len(joined) :]) <= {HALF}
    assert len(whole) - len(joined) <= 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_special_tokens_in_between_change_nothing(kind: str, seed: int) -> None:
    tokenizer = KINDS[kind]()
    rng = random.Random(seed)
    text = " ".join(rng.sample(TEXTS[:4], 3))
    specials = [tokenizer.token_to_id(special) for special in SPECIALS]
    plain = tokenizer.encode(text).ids
    ids = [i for token in plain for i in (*rng.choices(specials, k=rng.choice((0, 0, 1, 9))), token)]
    added = stream(tokenizer, ids[:1], ids[1:])
    assert tokenizer.decode(ids[:1]) + "".join(added) == tokenizer.decode(plain)
    assert all(piece == "" for token, piece in zip(ids[1:], added, strict=True) if token in specials)


@pytest.mark.parametrize("tokenizer", [legacy_llama(), metaspace()], ids=["llama 2", "metaspace"])
def test_the_space_before_a_word_is_kept_after_a_prompt(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("The quick").ids
    whole = tokenizer.encode("The quick brown fox").ids
    assert whole[: len(prompt)] == prompt
    assert "".join(stream(tokenizer, prompt, whole[len(prompt) :])) == " brown fox"


def test_a_character_comes_whole_with_its_last_byte() -> None:
    tokenizer = metaspace()
    first, *rest = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "🦄".encode())
    word = tokenizer.encode("dog").ids
    assert stream(tokenizer, word, [first, *rest]) == ["", "", "", "🦄"]


def test_an_answer_may_finish_a_character_that_the_prompt_began() -> None:
    tokenizer = metaspace()
    bytes_ = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "🦄".encode()]
    assert stream(tokenizer, [*tokenizer.encode("dog").ids, *bytes_[:2]], bytes_[2:]) == ["", "🦄"]


@pytest.mark.parametrize("kind", KINDS)
def test_long_runs_of_invalid_bytes_stay_cheap(kind: str) -> None:
    tokenizer = KINDS[kind]()
    byte = tokenizer.token_to_id("<0x82>") or tokenizer.encode("\u0082").ids[-1]
    word = tokenizer.encode("dog").ids
    counting = _Counting(tokenizer)
    detokenizer = Detokenizer(counting, (), word)  # type: ignore[arg-type]
    added = [detokenizer.push(token) for token in [byte] * 5000 + word]
    # Every token costs the same: what is decoded with it does not grow.
    assert counting.longest <= 8
    assert set("".join(added[:5000])) == {HALF}
    assert "".join(added).strip(" ").endswith("dog")


class _Counting:
    """A tokenizer that notes how much it is asked to decode at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.longest = 0

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        self.longest = max(self.longest, len(ids))
        return str(self._tokenizer.decode(ids, **options))


@pytest.mark.parametrize("tokenizer", [legacy_llama(), metaspace()], ids=["llama 2", "metaspace"])
def test_text_after_random_bytes_is_read_as_usual(tokenizer: Tokenizer) -> None:
    rng = random.Random(7)
    bytes_ = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    for _ in range(60):
        noise = [rng.choice((rng.choice(bytes_), rng.randrange(tokenizer.get_vocab_size()))) for _ in range(40)]
        text = tokenizer.encode("fox jumps").ids
        assert "".join(stream(tokenizer, text, noise + text)).endswith(" fox jumps")
