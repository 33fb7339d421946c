"""A tokenizer rebuilt from a bare vocabulary, as a `tokenizers.Tokenizer`: byte-level BPE and SentencePiece BPE.

GGUF files and SentencePiece models hold the vocabulary and its scores, but not the rules around it; those are
known per kind and stand here.
"""

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtforge.plugins.errors import CheckpointError, UnsupportedModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_PIECE_CHARACTERS = 512  # of a SentencePiece token; the longest in use has 48


class TokenType(IntEnum):
    """The same numbers in SentencePiece and in GGUF."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """tokens by id; types: TokenType of each; scores: of a SentencePiece vocabulary, higher merges first."""

    where: Path
    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[tuple[str, str]]
    bos_token_id: int | None
    eos_token_id: int | None
    add_bos: bool
    add_eos: bool
    strip_after_control: bool = False  # control tokens swallow the white space that follows (Phi-3)


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
)
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DEFAULT = (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before BPE.

    splits: expressions that cut it, each applied to the pieces of the one before; none: GPT-2's, after digits (each
    alone) if asked. whole_words: a piece that is a token as it stands is not merged anew. nfc: text is composed
    first. adds_bos: unless the file says otherwise.
    """

    splits: tuple[str, ...] = ()
    digits: bool = False
    whole_words: bool = False
    nfc: bool = False
    adds_bos: bool = False


#: by `tokenizer.ggml.pre`; the names are llama.cpp's
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo"), PreTokenizer()),
    **dict.fromkeys(("smollm", "starcoder", "refact"), PreTokenizer(digits=True)),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"),
        PreTokenizer((_LLAMA3,), whole_words=True, adds_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer((_LLAMA3,))),
    "qwen2": PreTokenizer((_QWEN2,), nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez", "stablelm2"), PreTokenizer((_QWEN2,))),
    **dict.fromkeys(("gpt-4o", "llama4"), PreTokenizer((_GPT4O,))),
    "default": PreTokenizer(
        _DEFAULT
    ),  # what llama.cpp does where a file does not say; seldom the model's own rule
    "tekken": PreTokenizer((_TEKKEN,), whole_words=True, adds_bos=True),
}


def pre_tokenizer(where: Path, name: str) -> PreTokenizer:
    """Raises UnsupportedModel that names the unknown one: a wrong guess would cost accuracy without a word."""
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"{where}: pre-tokenizer {name[:40]!r} (tokenizer.ggml.pre) is not known; known are "
            f"{', '.join(PRE_TOKENIZERS)}; pass the Hugging Face checkpoint instead"
        )
    return PRE_TOKENIZERS[name]


def byte_level(vocabulary: Vocabulary, rule: PreTokenizer) -> "Tokenizer":
    """BPE over bytes spelled as printable characters, as GPT-2 does it."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    model = _bpe(vocabulary, models.BPE, _ids(vocabulary), vocabulary.merges, ignore_merges=rule.whole_words)
    tokenizer = Tokenizer(model)
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = []
    steps.extend(pre_tokenizers.Split(Regex(split), behavior="isolated") for split in rule.splits)
    if rule.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not rule.splits))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return _finish(tokenizer, vocabulary)


def sentencepiece(vocabulary: Vocabulary, add_space_prefix: bool) -> "Tokenizer":
    """SentencePiece's BPE: spaces spelled U+2581, the pair that makes the highest-scored token merged first,
    bytes for what is not in the vocabulary."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    ids = _ids(vocabulary)
    unknown = [
        t for t, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == TokenType.UNKNOWN
    ]
    model = _bpe(
        vocabulary,
        models.BPE,
        ids,
        vocabulary.merges or merges_from_scores(vocabulary, ids),
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback=TokenType.BYTE in vocabulary.types,
    )
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if add_space_prefix else spaces
    )
    undo: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_space_prefix:
        undo.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(undo)
    return _finish(tokenizer, vocabulary)


def merges_from_scores(vocabulary: Vocabulary, ids: dict[str, int]) -> list[tuple[str, str]]:
    """The merges that a scored vocabulary implies: every way to make a token of two others, best token first;
    of the ways to make one token, that with the longer left part first."""
    merges: list[tuple[float, int, int, int, str, str]] = []
    for token, kind, score in zip(vocabulary.tokens, vocabulary.types, vocabulary.scores, strict=True):
        if kind not in (TokenType.NORMAL, TokenType.USER_DEFINED) or len(token) < 2:
            continue
        if len(token) > MAX_PIECE_CHARACTERS:
            raise CheckpointError(
                f"{vocabulary.where}: a token of {len(token)} characters; the vocabulary is damaged"
            )
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                merges.append((-score, -cut, ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


def _ids(vocabulary: Vocabulary) -> dict[str, int]:
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    if len(ids) != len(vocabulary.tokens):
        twice = next(t for i, t in enumerate(vocabulary.tokens) if ids[t] != i)
        raise CheckpointError(f"{vocabulary.where}: token {twice[:80]!r} stands twice in the vocabulary")
    return ids


def _bpe(
    vocabulary: Vocabulary, bpe: Any, ids: dict[str, int], merges: list[tuple[str, str]], **options: Any
) -> Any:
    try:
        return bpe(vocab=ids, merges=merges, **options)
    except Exception as e:  # the library raises bare Exceptions for merges that the vocabulary does not have
        raise CheckpointError(
            f"{vocabulary.where}: vocabulary and merges do not fit together ({str(e)[:200]})"
        ) from e


def _finish(tokenizer: "Tokenizer", vocabulary: Vocabulary) -> "Tokenizer":
    """Tokens that are matched whole in text, and BOS and EOS around it."""
    from tokenizers import AddedToken

    special, plain = [], []
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            rstrip = vocabulary.strip_after_control and kind == TokenType.CONTROL
            special.append(AddedToken(token, special=True, normalized=False, rstrip=rstrip))
        elif kind == TokenType.USER_DEFINED and set(token) != {"▁"}:  # runs of spaces are merged, not matched
            plain.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)
    add_bos_eos(
        tokenizer,
        vocabulary.bos_token_id if vocabulary.add_bos else None,
        vocabulary.eos_token_id if vocabulary.add_eos else None,
    )
    return tokenizer


def add_bos_eos(tokenizer: "Tokenizer", bos: int | None, eos: int | None) -> None:
    """Make `encode(text)` put these ids around the text; `add_special_tokens=False` leaves them out."""
    from tokenizers import processors

    ids = {"BOS": bos, "EOS": eos}
    present = {name: i for name, i in ids.items() if i is not None}
    # named BOS and EOS in the template, because a token's own text may hold its separator, a colon
    around, second = (
        [f"{name}:{side}" for name in ("BOS", text, "EOS") if name == text or name in present]
        for side, text in enumerate(("$A", "$B"))
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=around,
        pair=around + second,
        special_tokens=[
            {"id": name, "ids": [i], "tokens": [tokenizer.id_to_token(i)]} for name, i in present.items()
        ],
    )
