"""GGUF files written from Hugging Face checkpoints, as llama.cpp's converter writes them: what reading GGUF is
tested with. Names come from the `gguf` package's own map; the layouts follow the converter's rules.

`write("llama.gguf", directory, "Q4_0")` stores matrices in that type and the rest in F32.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Phi3ForCausalLM": "phi3",
    "Gemma3ForCausalLM": "gemma3",
}


def write(
    path: Path,
    directory: Path,
    dtype: str = "F32",
    *,
    encode: Callable[[Float32], NDArray[np.uint8]] | None = None,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, Float32] | None = None,
    split_max_tensors: int = 0,
) -> Path:
    """Convert the checkpoint in `directory` and give `path` back.

    encode: matrix -> its stored bytes [rows, bytes of a row], where the package cannot quantize to dtype.
    metadata: further or other entries (None: left out). extra: further F32 tensors. split_max_tensors: write parts
    `NAME-00001-of-0000n.gguf` of so many instead.
    """
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((directory / "config.json").read_text())
    arch = ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split_max_tensors)
    for key, value in {
        **model_metadata(config, arch),
        **tokenizer_metadata(directory),
        **(metadata or {}),
    }.items():
        if value is not None:
            add_entry(writer, key, value)
    kind = gguf.GGMLQuantizationType[dtype]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config["num_hidden_layers"])
    weights: dict[str, Float32] = {}
    for file in sorted(directory.glob("*.safetensors")):
        weights |= {k: v.astype(np.float32) for k, v in load_file(file).items()}
    for name, weight in weights.items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        weight = converted(name, weight, config, arch)
        if weight.ndim == 1 or dtype == "F32":
            writer.add_tensor(stored, weight)
        else:
            data = encode(weight) if encode else gguf.quants.quantize(weight, kind)
            writer.add_tensor(stored, data, raw_dtype=kind)
    for name, weight in {**factor_tables(config), **(extra or {})}.items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(name: str, weight: Float32, config: Mapping[str, Any], arch: str) -> Float32:
    """A weight as the converter stores it."""
    if arch == "llama" and ".q_proj." in name:
        return _interleaved(weight, config["num_attention_heads"])
    if arch == "llama" and ".k_proj." in name:
        return _interleaved(weight, config["num_key_value_heads"])
    if arch == "gemma3" and name.endswith("norm.weight"):
        return weight + np.float32(1)
    return weight


def _interleaved(weight: Float32, heads: int) -> Float32:
    """Of each head's rows, i and i + half side by side, for a rotation of neighbours."""
    half = weight.shape[0] // heads // 2
    order = [h * 2 * half + part * half + i for h in range(heads) for i in range(half) for part in (0, 1)]
    return weight[order]


def model_metadata(config: Mapping[str, Any], arch: str) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    # Gemma has rules per kind of layer; the metadata is that of the global ones
    rope = rope.get("full_attention", rope)
    entries: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope["rope_theta"]),
    }
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if config.get("head_dim"):
        entries |= {"attention.key_length": head_size, "attention.value_length": head_size}
    if arch in ("llama", "phi3"):
        entries["rope.dimension_count"] = int(head_size * rope.get("partial_rotary_factor", 1.0))
    if arch in ("phi3", "gemma3"):
        entries["attention.sliding_window"] = config.get("sliding_window") or 0
    if arch == "gemma3":
        entries["attention.sliding_window_pattern"] = [
            t == "sliding_attention" for t in config["layer_types"]
        ]
        entries["final_logit_softcapping"] = config.get("final_logit_softcapping")
    entries |= _rope_scaling(config, rope)
    return {f"{arch}.{key}": value for key, value in entries.items() if value is not None}


def _rope_scaling(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        return {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    if kind == "longrope":
        trained, context = config["max_position_embeddings"], _original_context(config, rope)
        scale = trained / context
        attention = math.sqrt(1 + math.log(scale) / math.log(context)) if scale > 1 else 1.0
        return {"rope.scaling.original_context_length": context, "rope.scaling.attn_factor": attention}
    return {}


def _original_context(config: Mapping[str, Any], rope: Mapping[str, Any]) -> int:
    return int(config.get("original_max_position_embeddings") or rope["original_max_position_embeddings"])


def factor_tables(config: Mapping[str, Any]) -> dict[str, Float32]:
    """Divisors of the frequencies, which llama.cpp keeps as tensors."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{w}.weight": np.array(rope[f"{w}_factor"], np.float32) for w in ("long", "short")
        }
    if rope.get("rope_type") != "llama3":
        return {}
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    divisors = []
    for i in range(0, head_size, 2):
        rotations = rope["original_max_position_embeddings"] / (
            2 * math.pi * rope["rope_theta"] ** (i / head_size)
        )
        kept = min(max((rotations - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - kept) / rope["factor"] + kept))
    return {"rope_freqs.weight": np.array(divisors, np.float32)}


def tokenizer_metadata(directory: Path) -> dict[str, Any]:
    """Of the byte-level tokenizer in `directory`, as checkpoints.save_tokenizer makes it."""
    if not (directory / "tokenizer.json").is_file():
        return {}
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    vocab = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    special = {t["content"] for t in tokenizer["added_tokens"]}
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    template = directory / "chat_template.jinja"
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": vocab,
        "tokenizer.ggml.token_type": [3 if t in special else 1 for t in vocab],
        "tokenizer.ggml.merges": [" ".join(m) for m in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": vocab.index(settings["bos_token"]),
        "tokenizer.ggml.eos_token_id": vocab.index(settings["eos_token"]),
        "tokenizer.ggml.padding_token_id": vocab.index(settings["pad_token"]),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": template.read_text() if template.is_file() else None,
    }


def add_entry(writer: Any, key: str, value: Any) -> None:
    """The entry in the type that converters use for its kind of value."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
