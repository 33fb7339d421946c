"""Tiny random checkpoints of every family and variation, saved by transformers, for the tests to build.

`save("llama", directory)` writes weights, config and a byte-level tokenizer, the same on every run. Weights
are drawn so that attention is sharp, logits spread over several units, and norms and biases differ from their
neutral values: a wrong detail moves the logits by far more than the tolerance.

torch and transformers are imported inside the functions only.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: 256 bytes, three special tokens, and a few merges; every variant's vocabulary is at least this.
TOKENIZER_SIZE = 272
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SIZES: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "pad_token_id": 256,
    "tie_word_embeddings": False,
}
_THETA = {"rope_theta": 10000.0}
_SHORT = [1.0 + 0.05 * i for i in range(8)]  # head_size / 2 factors
_LONG = [1.0 + 0.9 * i for i in range(8)]


@dataclass(frozen=True)
class Variant:
    """model: the transformers class without `ForCausalLM`; config: what differs
    from the common sizes; length: tokens that a comparison should run to see what is special about it."""

    model: str
    config: Mapping[str, Any] = field(default_factory=dict)
    length: int = 24
    max_shard_size: str = "1GB"


def _llama_rope(length: int = 40, **rope: Any) -> Variant:
    """Llama past its original context of 16 tokens."""
    return Variant("Llama", {"rope_parameters": {**_THETA, **rope}}, length)


VARIANTS: dict[str, Variant] = {
    "llama": Variant("Llama"),
    "llama-tied": Variant("Llama", {"tie_word_embeddings": True}),
    "llama-mha": Variant("Llama", {"num_key_value_heads": 4}),
    "llama-mqa": Variant("Llama", {"num_key_value_heads": 1}),
    "llama-head-size": Variant("Llama", {"head_dim": 24}),
    "llama-bias": Variant("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-odd-vocab": Variant("Llama", {"vocab_size": 277}),
    "llama-sharded": Variant("Llama", max_shard_size="100KB"),
    "llama-linear": _llama_rope(rope_type="linear", factor=4.0),
    "llama-dynamic": Variant(
        "Llama",
        {"rope_parameters": {**_THETA, "rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 16},
        length=40,
    ),
    "llama-llama3": _llama_rope(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=16,
    ),
    "llama-yarn": _llama_rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
    "llama-yarn-mscale": _llama_rope(
        rope_type="yarn",
        factor=4.0,
        original_max_position_embeddings=16,
        mscale=1.0,
        mscale_all_dim=0.5,
        beta_fast=4.0,
        beta_slow=0.5,
        truncate=False,
    ),
    "llama-longrope": _llama_rope(
        rope_type="longrope",
        short_factor=_SHORT,
        long_factor=_LONG,
        original_max_position_embeddings=16,
    ),
    "mistral": Variant("Mistral", {"sliding_window": None}),
    "mistral-window": Variant("Mistral", {"sliding_window": 8}, length=40),
    "qwen2": Variant("Qwen2"),
    "qwen2-window": Variant(
        "Qwen2",
        {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        length=40,
    ),
    "qwen2-layer-types": Variant(
        "Qwen2",
        {
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        length=40,
    ),
    "qwen3": Variant("Qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3-bias": Variant("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "phi3": Variant("Phi3"),
    "phi3-window": Variant("Phi3", {"sliding_window": 8}, length=40),
    "phi3-partial": Variant(
        "Phi3", {"rope_parameters": {**_THETA, "rope_type": "default", "partial_rotary_factor": 0.5}}
    ),
    "phi3-longrope": Variant(
        "Phi3",
        {
            "rope_parameters": {
                **_THETA,
                "rope_type": "longrope",
                "short_factor": _SHORT[:6],
                "long_factor": _LONG[:6],
                "partial_rotary_factor": 0.75,
            },
            "original_max_position_embeddings": 16,
        },
        length=40,
    ),
    "gemma3": Variant(
        "Gemma3",
        {
            "num_hidden_layers": 4,
            "head_dim": 24,
            "sliding_window": 8,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 20,
            "tie_word_embeddings": True,
        },
        length=40,
    ),
    "gemma3-untied": Variant(
        "Gemma3",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 16,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "final_logit_softcapping": 5.0,
        },
        length=40,
    ),
}


def save(name: str, directory: Path, *, seed: int = 0, **config: Any) -> Path:
    """Write one variant's checkpoint into `directory` (made if need be) and give it back.

    config: further config values over the variant's own.
    """
    import torch
    import transformers

    variant = VARIANTS[name]
    model_class = getattr(transformers, variant.model + "ForCausalLM")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(model_class.config_class(**{**_SIZES, **variant.config, **config})).eval()
        _randomize(model)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, max_shard_size=variant.max_shard_size)
    save_tokenizer(directory)
    return directory


def _randomize(model: Any) -> None:
    """Weights that show mistakes: sharp matrices, norms and biases off their neutral values."""
    import torch

    # Embeddings that the model scales up are smaller by as much: else each token would predict itself.
    scale = getattr(model.get_input_embeddings(), "scalar_embed_scale", 1.0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 0.2)
            elif "embed_tokens" in name:
                weight.normal_(0.0, 0.3 / scale)
            elif "lm_head" in name:
                weight.normal_(0.0, 0.3)
            else:
                weight.normal_(0.0, 1.5 / math.sqrt(weight.shape[1]))


def reference(directory: Path) -> Any:
    """The checkpoint as transformers runs it: fp32, plain attention, evaluation mode."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()


def prompt_ids(length: int, vocab_size: int = 256, seed: int = 0) -> list[int]:
    """Random token ids of the byte range, so that they decode to something."""
    import numpy as np

    return [int(t) for t in np.random.default_rng(seed).integers(0, vocab_size, length)]


def save_tokenizer(directory: Path) -> None:
    """A byte-level BPE with all 256 bytes, a few merges and a chat template, in Hugging Face's files."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    for token in SPECIAL_TOKENS:
        vocab[token] = len(vocab)
    merges = [("t", "h"), ("i", "n"), ("e", "r"), ("a", "n"), ("Ġ", "th"), ("r", "e"), ("o", "n"), ("e", "s")]
    merges += [("Ġ", "a"), ("Ġth", "e"), ("in", "g"), ("Ġ", "s"), ("o", "r")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    assert len(vocab) == TOKENIZER_SIZE

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
