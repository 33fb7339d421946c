"""The tokenizer that a GGUF file's metadata describes, rebuilt as tokenizer.json."""

import logging
from pathlib import Path
from typing import Any

import numpy as np

from trtforge.builder.checkpoint.base import TokenizerFiles
from trtforge.builder.checkpoint.gguf_config import Metadata
from trtforge.builder.checkpoint.tokenizer_build import (
    PreTokenizer,
    TokenType,
    Vocabulary,
    byte_level,
    pre_tokenizer,
    sentencepiece,
)
from trtforge.plugins.errors import CheckpointError, UnsupportedModel

_log = logging.getLogger(__name__)

#: SentencePiece vocabularies that are merged in the order of their ids, whatever their scores say
_MERGED_BY_ID = ("gemma", "gemma2", "gemma3")


def tokenizer_of_gguf(path: Path, metadata: Metadata, vocab_size: int) -> TokenizerFiles:
    """vocab_size: rows of the embedding; more tokens than that are an error.

    Raises CheckpointError for metadata that do not fit together, UnsupportedModel for a kind that is not known.
    """
    kind = metadata.text("tokenizer.ggml.model")
    if kind == "gpt2":
        rule = _rule(path, metadata)
        vocabulary = _vocabulary(path, metadata, vocab_size, adds_bos=rule.adds_bos)
        tokenizer = byte_level(vocabulary, rule)
    elif kind == "llama":
        if metadata.flag("tokenizer.ggml.remove_extra_whitespaces", default=False):
            raise UnsupportedModel(
                f"{path}: a SentencePiece tokenizer that drops white space, which is not supported"
            )
        vocabulary = _vocabulary(path, metadata, vocab_size, adds_bos=True)
        tokenizer = sentencepiece(vocabulary, metadata.flag("tokenizer.ggml.add_space_prefix", default=True))
    else:
        raise UnsupportedModel(
            f"{path}: tokenizer kind {kind[:40]!r} is not supported; supported are gpt2 (byte-level BPE) and llama "
            "(SentencePiece); pass the Hugging Face checkpoint instead"
        )
    template = metadata.get("tokenizer.chat_template")
    return TokenizerFiles(
        tokenizer_json=tokenizer.to_str().encode(),
        chat_template=template if isinstance(template, str) else None,
        bos_token_id=vocabulary.bos_token_id,
        eos_token_id=vocabulary.eos_token_id,
        pad_token_id=metadata.token_id("padding"),
        add_bos_token=vocabulary.add_bos,
    )


def _rule(path: Path, metadata: Metadata) -> PreTokenizer:
    name = metadata.text("tokenizer.ggml.pre", "default")
    if name == "default":
        _log.warning(
            "%s: does not say how its text is cut before BPE (tokenizer.ggml.pre); llama.cpp's default is taken, which "
            "costs accuracy if the model has another rule: convert it again with a newer llama.cpp",
            path,
        )
    return pre_tokenizer(path, name)


def _vocabulary(path: Path, metadata: Metadata, vocab_size: int, adds_bos: bool) -> Vocabulary:
    tokens = metadata.strings("tokenizer.ggml.tokens")
    if not tokens or len(tokens) > vocab_size:
        raise CheckpointError(
            f"{path}: {len(tokens)} tokens (tokenizer.ggml.tokens) for an embedding of {vocab_size} rows; "
            "convert the model again"
        )
    types = _numbers(metadata, "tokenizer.ggml.token_type", len(tokens), int(TokenType.NORMAL))
    scores = _numbers(metadata, "tokenizer.ggml.scores", len(tokens), 0.0)
    if metadata.architecture in _MERGED_BY_ID:
        scores = [-float(i) for i in range(len(tokens))]
    bos, eos = metadata.token_id("bos"), metadata.token_id("eos")
    if metadata.get("tokenizer.ggml.model") == "llama":
        # runs of spaces are stored as they look, not as SentencePiece spells them
        tokens = ["▁" * len(t) if len(t) > 1 and set(t) == {" "} else t for t in tokens]
    return Vocabulary(
        where=path,
        tokens=[t or f"[EMPTY_{i}]" for i, t in enumerate(tokens)],
        types=types,
        scores=scores,
        merges=[_merge(path, merge) for merge in metadata.strings("tokenizer.ggml.merges")],
        bos_token_id=bos,
        eos_token_id=eos,
        add_bos=bos is not None and metadata.flag("tokenizer.ggml.add_bos_token", default=adds_bos),
        add_eos=eos is not None and metadata.flag("tokenizer.ggml.add_eos_token", default=False),
        strip_after_control=metadata.architecture == "phi3"
        and metadata.get("tokenizer.ggml.model") == "llama",
    )


def _merge(path: Path, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not left or not space or not right:
        raise CheckpointError(f"{path}: merge {merge[:80]!r} is not two tokens; the vocabulary is damaged")
    return left, right


def _numbers(metadata: Metadata, key: str, count: int, default: Any) -> list[Any]:
    """An array with one number a token, or the default for all."""
    values = metadata.get(key)
    if values is None:
        return [default] * count
    if not isinstance(values, np.ndarray) or values.ndim != 1 or len(values) < count:
        raise metadata.fault(key, f"does not have one number for each of the {count} tokens")
    if not np.isfinite(values).all():
        raise metadata.fault(key, "holds numbers that are not finite")
    return list(values[:count].tolist())
