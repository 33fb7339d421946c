"""Rebuilt tokenizers give the ids that the model's own tokenizer gives."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from trtforge.builder.checkpoint import TokenizerFiles, open_checkpoint
from trtforge.plugins.errors import CheckpointError, UnsupportedModel

CORPUS = (
    "",
    " ",
    "Hello, world!",
    "  two leading, two trailing  ",
    "tabs\tand\n\nnewlines\r\n   and   runs      of spaces \n \n",
    "def f(x: int) -> str:\n    return f'{x!r:>10}' if x != 0 else \"\"\n",
    "It's we've I'LL they'd 'tis O'Neil's",
    "日本語のテキスト、中文文本，한국어 텍스트",
    "العربية עברית हिन्दी ไทย",
    "🙂👩‍👩‍👧‍👦 e\u0301 \u00e9 ﬁ ½ Ⅻ",
    "naïve café — “quotes” … €£¥ ©",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>",
    "a<|im_end|>b <|endoftext|> c<|not_special|>",
    "\x00\x01\x7f\u200b\ufeff\u3000",
    "CamelCaseWords snake_case SCREAMING_CASE kebab-case",
)
NUMBERS = (
    "0",
    "12",
    "1234567890",
    "3.14159",
    "a1b22c333",
    "  12  345 ",
    "٣٤",
    "x=10, y=20;",
    "1,000,000.00",
    "½Ⅻ²",
)


def of(path: Path) -> tuple[TokenizerFiles, Tokenizer]:
    files = open_checkpoint(path).tokenizer()
    return files, Tokenizer.from_buffer(files.tokenizer_json)


def test_a_gguf_file_gives_the_tokenizer_that_it_was_made_from(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    source, own = of(tiny_checkpoint("llama"))
    stored, rebuilt = of(gguf_files.write(tmp_path / "m.gguf", tiny_checkpoint("llama")))
    assert stored.chat_template == source.chat_template and "<|im_start|>" in str(stored.chat_template)
    for field in ("bos_token_id", "eos_token_id", "pad_token_id", "add_bos_token"):
        assert getattr(stored, field) == getattr(source, field), field
    assert rebuilt.get_vocab() == own.get_vocab()
    for text in (*CORPUS, *NUMBERS):
        ids = own.encode(text).ids
        assert rebuilt.encode(text).ids == ids, text
        assert rebuilt.decode(ids) == own.decode(ids)
        assert rebuilt.decode(ids, skip_special_tokens=False) == text


@pytest.mark.slow
def test_the_real_tokenizer_is_the_one_of_transformers(real_gguf: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(real_gguf.parent, gguf_file=real_gguf.name)
    files, ours = of(real_gguf)
    assert (files.bos_token_id, files.eos_token_id, files.pad_token_id, files.add_bos_token) == (
        1,
        2,
        2,
        False,
    )
    assert files.chat_template == theirs.chat_template
    assert ours.get_vocab() == theirs.get_vocab()
    for text in CORPUS:
        if any(c.isnumeric() for c in text):
            continue  # transformers does not know SmolLM's digits rule; the next test holds it
        assert ours.encode(text).ids == theirs(text).input_ids, text


@pytest.mark.slow
def test_the_real_tokenizer_takes_digits_one_by_one(real_gguf: Path) -> None:
    """SmolLM's rule: first each numeric character alone, then GPT-2's expression within what lies between."""
    _, ours = of(real_gguf)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text in (*CORPUS, *NUMBERS):
        if "<|" in text:
            continue
        alone = "".join(f"\0{c}\0" if c.isnumeric() else c for c in text.replace("\0", ""))
        words = [word for piece in alone.split("\0") if piece for word, _ in gpt2.pre_tokenize_str(piece)]
        want = [token.id for word in words for token in ours.model.tokenize(word)]
        assert ours.encode(text.replace("\0", "")).ids == want, text
        assert ours.decode(want) == text.replace("\0", "")
    assert ours.encode("in 2024").tokens == ["in", "Ġ", "2", "0", "2", "4"]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["It", "'s", " CamelCase", "'", "S", " 12345", " x", "!!", "\n\n", " y", " .", "9"]),
        ("smollm", ["It", "'s", " CamelCase", "'", "S", " ", *"12345", " x", "!!", "\n\n", " y", " .", "9"]),
        ("llama-bpe", ["It", "'s", " CamelCase", "'S", " ", "123", "45", " x", "!!\n\n", " y", " .", "9"]),
        ("dbrx", ["It", "'s", " CamelCase", "'S", " ", "123", "45", " x", "!!\n\n", " y", " .", "9"]),
        ("qwen2", ["It", "'s", " CamelCase", "'S", " ", *"12345", " x", "!!\n\n", " y", " .", "9"]),
        ("gpt-4o", ["It's", " Camel", "Case'S", " ", "123", "45", " x", "!!\n\n", " y", " .", "9"]),
        ("tekken", ["It", "'s", " Camel", "Case", "'S", " ", *"12345", " x", "!!\n\n", " y", " .", "9"]),
        (
            "default",
            [
                "It",
                "'",
                "s",
                " CamelCase",
                "'",
                "S",
                " ",
                "123",
                "45",
                " x",
                "!!",
                "\n\n",
                " y",
                " ",
                ".",
                "9",
            ],
        ),
    ],
)
def test_each_pre_tokenizer_cuts_by_its_own_rule(
    pre: str, pieces: list[str], tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Worked out by hand from each model's published expression."""
    path = gguf_files.write(
        tmp_path / "m.gguf", tiny_checkpoint("llama"), metadata={"tokenizer.ggml.pre": pre}
    )
    _, tokenizer = of(path)
    text = "".join(pieces)
    cut = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cut] == pieces
    for text in CORPUS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) in (text, nfc(text))


def nfc(text: str) -> str:
    return str(normalizers.NFC().normalize_str(text))


def test_what_else_belongs_to_a_pre_tokenizer(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    tokens = gguf_files.tokenizer_metadata(tiny_checkpoint("llama"))["tokenizer.ggml.tokens"]
    types = [3 if t.startswith("<|") else 1 for t in tokens] + [1]
    # a token that no merge leads to: found whole only where whole words go before merges
    whole = {"tokenizer.ggml.tokens": [*tokens, "Ġqqq"], "tokenizer.ggml.token_type": types}

    def tokenizer(pre: str, **more: Any) -> Tokenizer:
        metadata = {**whole, "tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": None, **more}
        return of(gguf_files.write(tmp_path / "m.gguf", tiny_checkpoint("llama"), metadata=metadata))[1]

    assert tokenizer("llama-bpe").encode(" qqq").tokens == ["<|endoftext|>", "Ġqqq"]
    assert tokenizer("dbrx").encode(" qqq").tokens == ["Ġ", "q", "q", "q"]
    assert tokenizer("qwen2").encode("e\u0301").ids == tokenizer("qwen2").encode("\u00e9").ids
    assert tokenizer("gpt-2").encode("e\u0301").ids != tokenizer("gpt-2").encode("\u00e9").ids
    assert tokenizer("llama-bpe", **{"tokenizer.ggml.add_bos_token": False}).encode("a").tokens == ["a"]
    both = tokenizer("gpt-2", **{"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True})
    assert both.encode("a").tokens == ["<|endoftext|>", "a", "<|im_end|>"]
    assert both.encode("a", add_special_tokens=False).tokens == ["a"]


def test_a_default_pre_tokenizer_is_said_aloud(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    of(gguf_files.write(tmp_path / "m.gguf", tiny_checkpoint("llama"), metadata={"tokenizer.ggml.pre": None}))
    assert "does not say how its text is cut before BPE" in caplog.text


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokenizer.ggml.pre": "martian"}, "pre-tokenizer 'martian'"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer kind 'bert' is not supported"),
        ({"tokenizer.ggml.model": None}, "'tokenizer.ggml.model' is missing"),
        (
            {"tokenizer.ggml.tokens": [f"t{i}" for i in range(400)]},
            "400 tokens .* for an embedding of 288 rows",
        ),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, "token 'a' stands twice"),
        ({"tokenizer.ggml.merges": ["ab"]}, "merge 'ab' is not two tokens"),
        ({"tokenizer.ggml.merges": ["zz yy"]}, "vocabulary and merges do not fit together"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "does not have one number for each of the 272 tokens"),
    ],
)
def test_a_damaged_vocabulary_is_named(
    metadata: dict[str, Any], message: str, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(
        gguf_files.write(tmp_path / "m.gguf", tiny_checkpoint("llama"), metadata=metadata)
    )
    with pytest.raises((CheckpointError, UnsupportedModel), match=message):
        checkpoint.tokenizer()


# ---- SentencePiece ----


def sentencepiece_vocabulary(rng: np.random.Generator) -> tuple[list[str], list[float], list[int]]:
    """Special tokens, all bytes, letters, and 300 longer tokens in order of falling score.

    No token begins with its own end (as `aba` does): for those several ways to merge tie, and implementations differ.
    """
    letters = list("▁abcdeé日")
    longer: dict[str, None] = {}
    while len(longer) < 300:
        parts = [*letters, *longer]
        token = str(rng.choice(parts)) + str(rng.choice(parts))
        if len(token) <= 6 and not any(token.startswith(token[-n:]) for n in range(1, len(token))):
            longer[token] = None
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        *longer,
        *letters,
        "<|user|>",
        "\n\n",
    ]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(longer) + len(letters)), 3, 4]
    return tokens, [0.0] * 259 + [-float(i) for i in range(len(longer) + len(letters))] + [0.0, 0.0], types


def sentencepiece_ids(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """The definition: of all neighbours that make a token, merge the best-scored (the leftmost of equals)."""
    ids = {t: i for i, t in enumerate(tokens)}
    parts = list(text.replace(" ", "▁"))
    while True:
        made = [
            (-scores[ids[a + b]], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ids
        ]
        if not made:
            break
        i = min(made)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [i for p in parts for i in ([ids[p]] if p in ids else [3 + b for b in p.encode()])]


def sentencepiece_gguf(
    directory: Path, path: Path, rng: np.random.Generator, **more: Any
) -> tuple[Path, list[str], list[float]]:
    tokens, scores, types = sentencepiece_vocabulary(rng)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": None,
        **more,
    }
    return gguf_files.write(path, directory, metadata=metadata), tokens, scores


@pytest.fixture(scope="module")
def wide_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its vocabulary holds the SentencePiece one."""
    import checkpoints

    return checkpoints.save("llama", tmp_path_factory.mktemp("wide"), vocab_size=640)


def random_texts(rng: np.random.Generator, count: int) -> list[str]:
    letters = [*" abcdeé日", "x", "🙂"]
    return ["".join(rng.choice(letters, rng.integers(1, 40))) for _ in range(count)]


def test_sentencepiece_merges_the_best_token_first(
    wide_checkpoint: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    path, tokens, scores = sentencepiece_gguf(wide_checkpoint, tmp_path / "m.gguf", rng)
    files, tokenizer = of(path)
    assert files.add_bos_token and files.bos_token_id == 1 and files.eos_token_id == 2
    for text in random_texts(rng, 300):
        want = sentencepiece_ids(" " + text, tokens, scores)
        assert tokenizer.encode(text, add_special_tokens=False).ids == want, text
        assert tokenizer.encode(text).ids == [1, *want]
        assert tokenizer.decode(want) == text
    assert tokenizer.encode("").ids == [1]
    mixed = [
        *sentencepiece_ids(" ab", tokens, scores),
        tokens.index("<|user|>"),
        *sentencepiece_ids(" cd", tokens, scores),
    ]
    assert tokenizer.encode("ab<|user|>cd", add_special_tokens=False).ids == mixed
    assert tokens.index("\n\n") in tokenizer.encode("a\n\nb").ids  # a user-defined token is matched whole


def test_a_space_in_front_is_added_only_where_the_file_says(
    wide_checkpoint: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    path, tokens, scores = sentencepiece_gguf(
        wide_checkpoint,
        tmp_path / "m.gguf",
        rng,
        **{"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False},
    )
    files, tokenizer = of(path)
    assert not files.add_bos_token
    for text in random_texts(rng, 50):
        assert tokenizer.encode(text).ids == sentencepiece_ids(text, tokens, scores)
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_merges_are_those_that_transformers_derives(rng: np.random.Generator) -> None:
    """Tokens that begin with their own end, too: there the order of ways to make one matters."""
    from transformers.tokenization_utils_base import generate_merges

    from trtforge.builder.checkpoint.tokenizer_build import Vocabulary, merges_from_scores

    tokens = list("ab") + sorted({"".join(rng.choice(list("ab"), rng.integers(2, 7))) for _ in range(60)})
    ids = {t: i for i, t in enumerate(tokens)}
    scores = [-float(i) for i in range(len(tokens))]
    mine = merges_from_scores(
        Vocabulary(Path("x"), tokens, [1] * len(tokens), scores, [], None, None, False, False), ids
    )
    assert mine == [tuple(m) for m in generate_merges(ids, dict(zip(tokens, scores, strict=True)))]


def test_phi3_control_tokens_swallow_the_space_behind_them(tmp_path: Path, rng: np.random.Generator) -> None:
    import checkpoints

    directory = checkpoints.save("phi3", tmp_path / "phi3", vocab_size=640)
    path, tokens, scores = sentencepiece_gguf(directory, tmp_path / "m.gguf", rng)
    _, tokenizer = of(path)
    user = tokens.index("<|user|>")
    want = [1, user, *sentencepiece_ids(" ab", tokens, scores)]
    assert tokenizer.encode("<|user|>  ab").ids == tokenizer.encode("<|user|>ab").ids == want


# ---- Hugging Face directories ----


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "bos_token_id": 2})
    )
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "<s>": 2, "</s>": 3}, merges=[]))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def settings(directory: Path, **values: Any) -> Path:
    (directory / "tokenizer_config.json").write_text(json.dumps(values))
    return directory


def test_tokenizer_json_is_kept_byte_for_byte(directory: Path) -> None:
    files, _ = of(settings(directory, bos_token={"content": "<s>"}, eos_token="</s>", pad_token=None))
    assert files.tokenizer_json == (directory / "tokenizer.json").read_bytes()
    assert (files.bos_token_id, files.eos_token_id, files.pad_token_id) == (2, 3, None)
    assert not files.add_bos_token and files.chat_template is None


@pytest.mark.parametrize("flag", [None, False, True])
@pytest.mark.parametrize("template", [None, "<s>:0 $A:0", "<s>:0 $A:0 </s>:0"])
def test_tokenizer_json_decides_about_bos_as_in_transformers(
    flag: bool | None, template: str | None, directory: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    if template:
        special = [("<s>", 2), ("</s>", 3)]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
        tokenizer.save(str(directory / "tokenizer.json"))
    settings(
        directory,
        bos_token="<s>",
        eos_token="</s>",
        tokenizer_class="PreTrainedTokenizerFast",
        **({} if flag is None else {"add_bos_token": flag}),
    )
    files, tokenizer = of(directory)
    assert tokenizer.encode("ab").ids == AutoTokenizer.from_pretrained(directory)("ab").input_ids
    assert files.add_bos_token == (template is not None)


def test_special_tokens_come_from_the_config_where_no_tokenizer_file_names_them(directory: Path) -> None:
    assert of(directory)[0].bos_token_id == 2
    (directory / "special_tokens_map.json").write_text('{"bos_token": "</s>"}')
    assert of(directory)[0].bos_token_id == 3
    assert of(settings(directory, bos_token="<s>"))[0].bos_token_id == 2


def test_the_chat_template_is_found_wherever_it_is(directory: Path) -> None:
    assert of(settings(directory, chat_template="inline"))[0].chat_template == "inline"
    named = [{"name": "tool", "template": "no"}, {"name": "default", "template": "yes"}]
    assert of(settings(directory, chat_template=named))[0].chat_template == "yes"
    (directory / "chat_template.jinja").write_text("own file")
    assert of(directory)[0].chat_template == "own file"


def test_a_damaged_or_missing_tokenizer_says_what_to_do(directory: Path) -> None:
    (directory / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        of(directory)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="has neither tokenizer"):
        of(directory)


def field(number: int, value: int | float | bytes) -> bytes:
    """One protobuf field."""
    if isinstance(value, float):
        return varint(number << 3 | 5) + np.float32(value).tobytes()
    if isinstance(value, int):
        return varint(number << 3) + varint(value % 2**64)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    data = b""
    while value > 127:
        data, value = data + bytes([value & 127 | 128]), value >> 7
    return data + bytes([value])


def sentencepiece_model(tokens: list[str], scores: list[float], types: list[int], **other: Any) -> bytes:
    pieces = (
        field(1, field(1, t.encode()) + field(2, float(s)) + field(3, k))
        for t, s, k in zip(tokens, scores, types, strict=True)
    )
    trainer = field(3, other.get("model_type", 2)) + field(41, 1) + field(42, 2) + field(43, -1)
    normalizer = field(1, b"identity") + field(2, other.get("charsmap", b"")) + field(4, 0)
    return b"".join(pieces) + field(2, trainer) + field(3, normalizer)


def test_a_sentencepiece_model_alone_is_rebuilt(directory: Path, rng: np.random.Generator) -> None:
    tokens, scores, types = sentencepiece_vocabulary(rng)
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer.model").write_bytes(sentencepiece_model(tokens, scores, types))
    added = {str(len(tokens)): {"content": "<|new|>", "special": True}}
    files, tokenizer = of(settings(directory, bos_token="<s>", eos_token="</s>", added_tokens_decoder=added))
    assert files.add_bos_token and (files.bos_token_id, files.eos_token_id) == (1, 2)
    for text in random_texts(rng, 100):
        assert tokenizer.encode(text).ids == [1, *sentencepiece_ids(" " + text, tokens, scores)]
    assert tokenizer.token_to_id("<|new|>") == len(tokens)


@pytest.mark.parametrize(
    ("other", "message"),
    [({"model_type": 1}, "not BPE"), ({"charsmap": b"x"}, "normalizes text")],
)
def test_other_sentencepiece_models_are_refused(other: dict[str, Any], message: str, directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer.model").write_bytes(sentencepiece_model(["<unk>"], [0.0], [2], **other))
    with pytest.raises(UnsupportedModel, match=message):
        of(directory)
