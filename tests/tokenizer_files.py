"""Small tokenizers of the kinds that the supported models have, trained or written here."""

import json
from functools import cache

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 42 degrees!",
    "def main(args):\n    return {'a': 1, \"b\": [2, 3]}\n\n\n",
    "Größe, naïve, çağ, Ελληνικά, кириллица, עברית, العربية",
    "日本語のテキスト、中文文本，한국어 텍스트 🙂🙃👩‍👩‍👧 𝒳𝒴𝒵",
] * 4

SPECIAL = ["<s>", "</s>", "<|im_start|>"]


@cache
def byte_level() -> Tokenizer:
    """As Llama 3, Qwen and SmolLM: bytes as printable characters, merged; BOS in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False)])
    return _with_bos(tokenizer)


def _sentencepiece(decoder: decoders.Decoder, prepend: bool) -> Tokenizer:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme="always"
    )  # words that begin with their space
    trained.train_from_iterator(
        [text[:60] for text in CORPUS],
        trainers.BpeTrainer(vocab_size=200, limit_alphabet=60, show_progress=False),
    )
    raw = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", *SPECIAL, *(f"<0x{b:02X}>" for b in range(256)), *raw["vocab"]]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = [tuple(m) for m in raw["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if prepend else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", *SPECIAL)])
    return _with_bos(tokenizer)


@cache
def llama2() -> Tokenizer:
    """SentencePiece with byte fallback; a space before the first word, which decoding drops."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _sentencepiece(decoders.Sequence(steps), prepend=True)


@cache
def gemma() -> Tokenizer:
    """SentencePiece with byte fallback, and no space that is not in the text."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _sentencepiece(decoders.Sequence(steps), prepend=False)


def _with_bos(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


KINDS = {"byte-level": byte_level, "llama2": llama2, "gemma": gemma}
