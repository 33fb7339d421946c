"""A stream of text against the whole text, token by token and cut up at random, for every kind of tokenizer."""

import json
import random
from collections.abc import Sequence
from functools import cache

import pytest
import tokenizer_files
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Fast

from trtforge.plugins.errors import UnsupportedModel
from trtforge.runtime.detokenizer import Detokenizer, TokenBytes

TEXTS = [
    "Hello, world!",
    "  two spaces first, and last  ",
    "def f(x):\n\treturn x ** 2\n",
    "日本語 한국어 中文 🙂 👩‍👩‍👧 𝒳",
    "Größe çağ кириллица עברית",
    "\n\n\n",
    "a",
    "▁ is SentencePiece's space",
]


@cache
def table(fast: Fast) -> TokenBytes:
    return TokenBytes.from_tokenizer_json(json.loads(fast.to_str()), "test")


def streamed(
    fast: Fast, ids: Sequence[int], prompt: Sequence[int] = (), stop: Sequence[str] = ()
) -> list[str]:
    detokenizer = Detokenizer(table(fast), prompt, stop)
    return [*(detokenizer.feed([i]) for i in ids), detokenizer.finish()]


@pytest.mark.parametrize("kind", tokenizer_files.KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_the_stream_is_the_whole_text(kind: str, text: str) -> None:
    fast = tokenizer_files.KINDS[kind]()
    ids = fast.encode(text).ids
    parts = streamed(fast, ids)
    assert "".join(parts) == fast.decode(ids) == text.replace("▁", " " if kind != "byte-level" else "▁")
    assert all("\ufffd" not in part for part in parts), "half a character was given out"


@pytest.mark.parametrize("kind", tokenizer_files.KINDS)
def test_the_stream_continues_the_prompt(kind: str) -> None:
    """Prompt and output put together read as if they had been decoded together."""
    fast, rng = tokenizer_files.KINDS[kind](), random.Random(1)
    for text in TEXTS * 4:
        ids = fast.encode(text).ids
        cut = rng.randrange(len(ids) + 1)
        prompt, output = ids[:cut], ids[cut:]
        whole = fast.decode(ids)
        if "\ufffd" not in fast.decode(prompt):  # the cut is between characters
            assert fast.decode(prompt) + "".join(streamed(fast, output, prompt)) == whole


@pytest.mark.parametrize("kind", tokenizer_files.KINDS)
def test_random_tokens_give_the_tokenizers_own_text(kind: str) -> None:
    """Any sequence whose bytes are whole characters, specials and plain added tokens among them."""
    fast, rng = tokenizer_files.KINDS[kind](), random.Random(2)
    pieces = table(fast)
    compared = 0
    for _ in range(1500):
        ids = [rng.randrange(fast.get_vocab_size()) for _ in range(rng.randrange(1, 6))]
        parts = "".join(streamed(fast, ids))
        try:
            b"".join(pieces[i] for i in ids).decode()
        except UnicodeDecodeError:
            # The library makes U+FFFD of every byte of a run with one fault in it; a stream cannot take back what
            # was right, so only where the faults are may differ.
            assert "\ufffd" in parts
            if kind == "byte-level":
                assert parts == fast.decode(ids)
            continue
        assert parts == fast.decode(ids)
        compared += 1
    assert compared > 300


def test_random_bytes_are_never_an_error_and_do_not_depend_on_the_cuts() -> None:
    fast, rng = tokenizer_files.byte_level(), random.Random(3)
    by_byte = [fast.token_to_id(c) for c in sorted(fast.get_vocab()) if len(c) == 1]
    for _ in range(2000):
        ids = [rng.choice(by_byte) for _ in range(rng.randrange(12))]
        assert "".join(streamed(fast, ids)) == fast.decode(ids)


def test_half_a_character_at_the_end_becomes_a_replacement() -> None:
    fast = tokenizer_files.llama2()
    smile = [fast.token_to_id(f"<0x{b:02X}>") for b in "🙂".encode()]
    assert streamed(fast, smile) == ["", "", "", "🙂", ""]
    assert streamed(fast, smile[:3]) == ["", "", "", "\ufffd"]
    assert "".join(streamed(fast, [*smile[:2], *smile])) == "\ufffd🙂"


@pytest.mark.parametrize("kind", tokenizer_files.KINDS)
def test_special_tokens_are_no_text(kind: str) -> None:
    fast = tokenizer_files.KINDS[kind]()
    ids = [fast.token_to_id(t) for t in tokenizer_files.SPECIAL]
    assert "".join(streamed(fast, ids)) == ""
    assert streamed(fast, [10**6]) == ["", ""], "a padded vocabulary has ids that are no tokens"


def test_text_is_not_held_back_without_need() -> None:
    fast = tokenizer_files.byte_level()
    ids = fast.encode("The quick brown fox", add_special_tokens=False).ids
    assert [p != "" for p in streamed(fast, ids, stop=["STOP"])] == [True] * len(ids) + [False]


ALPHABET = "ab🙂"


def by_definition(text: str, stops: list[str]) -> str:
    """What comes before the stop string that is complete first, and of those the longest."""
    for end in range(len(text) + 1):
        fits = [s for s in stops if text[:end].endswith(s)]
        if fits:
            return text[: end - max(map(len, fits))]
    return text


@settings(max_examples=500, deadline=None, derandomize=True, database=None)
@given(
    text=st.text(ALPHABET, max_size=14),
    stops=st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 5), min_size=16, max_size=16),
)
def test_stop_strings_match_across_tokens_and_do_not_depend_on_the_cuts(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    data, pieces = text.encode(), []
    while data:
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(data[:size])
        data = data[size:]
    detokenizer = Detokenizer(TokenBytes(pieces), stop=stops)
    seen = ""
    for i in range(len(pieces)):
        seen += detokenizer.feed([i])
        assert by_definition(text, stops).startswith(seen), "part of a stop string was given out"
    seen += detokenizer.finish()
    assert seen == by_definition(text, stops)
    assert (detokenizer.stopped_by is not None) == any(s in text for s in stops)


def test_nothing_comes_after_a_stop_string() -> None:
    detokenizer = Detokenizer(TokenBytes([b"one ST", b"OP two", b"three"]), stop=["STOP"])
    assert [detokenizer.feed([i]) for i in (0, 1, 2)] == ["one ", "", ""]
    assert (detokenizer.finish(), detokenizer.stopped_by) == ("", "STOP")


def test_what_only_might_have_been_a_stop_string_comes_at_the_end() -> None:
    detokenizer = Detokenizer(TokenBytes([b"one ST"]), stop=["STOP"])
    assert (detokenizer.feed([0]), detokenizer.finish(), detokenizer.stopped_by) == ("one ", "ST", None)


def test_a_stop_string_before_it_may_stop_is_text() -> None:
    detokenizer = Detokenizer(TokenBytes([b"STOP ", b"STOP"]), stop=["STOP"])
    assert detokenizer.feed([0], may_stop=False) + detokenizer.feed([1]) == "STOP "
    assert detokenizer.stopped_by == "STOP"


def test_an_unknown_decoder_is_refused_by_name() -> None:
    raw = json.loads(tokenizer_files.byte_level().to_str())
    raw["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    with pytest.raises(UnsupportedModel, match="WordPiece"):
        TokenBytes.from_tokenizer_json(raw, "tokenizer.json")
