"""The parameters of the engine model's config.pbtxt -> how the engine is run. The names are the old repository's,
so that a config can be carried over; a key that asks for what is not done is refused by name. Standard library
only, apart from the runtime's own configuration.
"""

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from trtforge.plugins.errors import InvalidArgument
from trtforge.runtime.config import EngineConfig, available_memory

#: Where the engine lies, relative to the version folder.
ENGINE_PATH = "engine"

POLICIES = {"guaranteed_no_evict": "guaranteed_no_evict", "max_utilization": "max_utilization"}
BATCHING = ("inflight_fused_batching", "inflight_batching")
DECODING_MODES = ("top_k", "top_p", "top_k_top_p", "auto")
UNFILLED = re.compile(r"\$\{[^}]*\}")


class Rule(Enum):
    HONOUR = "honoured"
    IGNORE = "accepted, has no effect"
    REFUSE = "refused if set"


@dataclass(frozen=True)
class Parameter:
    """neutral: values of a REFUSE parameter that ask for nothing. new: not in the old repository."""

    key: str
    rule: Rule
    meaning: str
    neutral: tuple[str, ...] = ()
    new: bool = False


def honour(key: str, meaning: str, new: bool = False) -> Parameter:
    return Parameter(key, Rule.HONOUR, meaning, new=new)


def ignore(key: str, meaning: str) -> Parameter:
    return Parameter(key, Rule.IGNORE, meaning)


def refuse(key: str, meaning: str, *neutral: str) -> Parameter:
    return Parameter(key, Rule.REFUSE, meaning, neutral)


PARAMETERS = (
    honour(
        "gpt_model_type", "`inflight_fused_batching` or `inflight_batching`, the same here; `V1` is refused"
    ),
    honour("gpt_model_path", f"the engine, relative to the version folder; default `{ENGINE_PATH}`"),
    honour("max_tokens_in_paged_kv_cache", "tokens that the KV cache holds"),
    honour(
        "kv_cache_free_gpu_mem_fraction",
        "share of the free memory for the KV cache; the smaller of the two counts",
    ),
    honour("batch_scheduler_policy", "`guaranteed_no_evict` or `max_utilization` (default)"),
    honour("exclude_input_in_output", "`true` (was `false`); `false` puts the prompt first"),
    honour("decoding_mode", "`top_k`, `top_p` and `top_k_top_p` are one; others are refused"),
    honour(
        "max_queue_size",
        "requests that may wait, 0 is any number; more are refused with `[OVERLOADED]`; "
        "`dynamic_batching.default_queue_policy.max_queue_size` is honoured too",
        new=True,
    ),
    honour("max_num_tokens", "tokens in one step, at most the engine's own limit", new=True),
    honour("default_deadline_ms", "deadline of requests that bring none", new=True),
    honour("engine_model", "of the text models: the name of the model that holds the engine", new=True),
    ignore("FORCE_CPU_ONLY_INPUT_TENSORS", "inputs always lie in host memory"),
    ignore("tokenizer_dir", "the engine brings its own tokenizer"),
    ignore("triton_backend", "there is one"),
    ignore(
        "executor_worker_path", "the engine runs in the model's own process; the old template always set it"
    ),
    ignore("triton_max_batch_size", "the config's own `max_batch_size` counts"),
    ignore("cancellation_check_period_ms", "checked every few steps"),
    ignore("stats_check_period_ms", "updated several times a second"),
    ignore("iter_stats_max_iterations", ""),
    ignore("request_stats_max_iterations", ""),
    ignore("normalize_log_probs", "for beams only"),
    ignore("enable_trt_overlap", ""),
    ignore("enable_chunked_context", "prompts are always computed in chunks"),
    ignore("enable_kv_cache_reuse", "a matter of speed only"),
    ignore("kv_cache_onboard_blocks", ""),
    ignore("gpu_device_ids", "the engine's target decides"),
    ignore("multi_block_mode", ""),
    ignore("enable_context_fmha_fp32_acc", ""),
    ignore("cuda_graph_mode", "a matter of speed only"),
    ignore("cuda_graph_cache_size", ""),
    ignore("add_special_tokens", "the tokenizer's own rule"),
    ignore("skip_special_tokens", "special tokens are never text"),
    ignore("accumulate_tokens", "detokenizing is exact, deltas are"),
    ignore("tensorrt_llm_model_name", "see engine_model"),
    ignore("logits_datatype", "logits are not given out"),
    refuse("max_beam_width", "there is no beam search", "1", "0"),
    refuse("max_attention_window_size", "windows are the engine's own"),
    refuse("sink_token_length", "attention sinks are not done yet", "0"),
    refuse("kv_cache_host_memory_bytes", "a host tier for KV blocks is not done yet", "0"),
    refuse("cross_kv_cache_fraction", "encoder-decoder models are not done", "0", "0.0", "0.5"),
    refuse("encoder_model_path", "encoder-decoder models are not done"),
    refuse("gpu_weights_percent", "weight streaming is not done yet", "1", "1.0"),
    refuse("participant_ids", "engines over several devices are not done yet"),
    refuse("num_nodes", "engines over several devices are not done yet", "0", "1"),
    refuse("lora_cache_optimal_adapter_size", "LoRA adapters are not done yet", "0"),
    refuse("lora_cache_max_adapter_size", "LoRA adapters are not done yet", "0"),
    refuse("lora_cache_gpu_memory_fraction", "LoRA adapters are not done yet", "0"),
    refuse("lora_cache_host_memory_bytes", "LoRA adapters are not done yet", "0"),
    refuse("lora_prefetch_dir", "LoRA adapters are not done yet"),
    refuse("medusa_choices", "draft tokens are not done yet"),
    refuse("eagle_choices", "draft tokens are not done yet"),
    refuse("lookahead_window_size", "draft tokens are not done yet", "0"),
    refuse("lookahead_ngram_size", "draft tokens are not done yet", "0"),
    refuse("lookahead_verification_set_size", "draft tokens are not done yet", "0"),
    refuse("speculative_decoding_fast_logits", "draft tokens are not done yet", "0", "false"),
    refuse("guided_decoding_backend", "guided decoding is not done yet"),
    refuse("xgrammar_tokenizer_info_path", "guided decoding is not done yet"),
    refuse("prompt_embedding_table_data_type", "prompt tuning is not done"),
)
BY_KEY = {p.key: p for p in PARAMETERS}


@dataclass(frozen=True)
class ModelOptions:
    """What a model of the repository is told by its config.pbtxt."""

    engine_path: Path = Path(ENGINE_PATH)
    engine_model: str = ""
    echo: bool = False
    deadline_ms: int | None = None
    tokens: int | None = None
    memory_fraction: float | None = None
    policy: str = "max_utilization"
    queue: int | None = None
    max_num_tokens: int | None = None

    def engine_config(self, bytes_per_token: int) -> EngineConfig:
        """Of the two ways to size the KV cache the smaller one counts, as it did."""
        tokens = self.tokens
        if self.memory_fraction is not None:
            by_memory = int(available_memory() * self.memory_fraction) // bytes_per_token
            tokens = by_memory if tokens is None else min(tokens, by_memory)
        config = EngineConfig(kv_cache_tokens=tokens, policy=self.policy, max_num_tokens=self.max_num_tokens)
        return config if self.queue is None else replace(config, max_queue_requests=self.queue or None)


def faults(parameters: Mapping[str, str]) -> list[tuple[str, str]]:
    """(key, what is wrong) of everything that cannot be honoured."""
    found = []
    for key, raw in parameters.items():
        if UNFILLED.search(raw):
            found.append((key, f"{raw!r} was never filled in; give it a value or remove the key"))
        elif key not in BY_KEY:
            close = difflib.get_close_matches(key, BY_KEY, n=1)
            found.append((key, "unknown parameter" + (f"; did you mean {close[0]!r}?" if close else "")))
        elif message := fault_of(BY_KEY[key], raw.strip()):
            found.append((key, message))
    return found


def fault_of(parameter: Parameter, raw: str) -> str:
    if not raw:
        return ""
    if parameter.rule is Rule.REFUSE:
        return "" if raw.lower() in parameter.neutral else f"{raw!r} is not supported: {parameter.meaning}"
    if parameter.rule is Rule.HONOUR and parameter.key in READERS:
        try:
            READERS[parameter.key](raw)
        except (ValueError, InvalidArgument) as e:
            return str(e)
    return ""


def read(parameters: Mapping[str, str]) -> ModelOptions:
    """Raises InvalidArgument that names the first key that cannot be honoured."""
    for key, message in faults(parameters):
        raise InvalidArgument(f"parameter {key}: {message}")
    options: dict[str, Any] = {}
    for key, raw in parameters.items():
        if key in READERS and raw.strip():
            options |= READERS[key](raw.strip())
    return ModelOptions(**options)


def of_model(config: str) -> tuple[ModelOptions, bool]:
    """(options, decoupled) from the JSON model configuration that Triton gives to a model."""
    model = json.loads(config)
    given = {k: v["string_value"] for k, v in model.get("parameters", {}).items()}
    policy = model.get("dynamic_batching", {}).get("default_queue_policy", {})
    if policy.get("max_queue_size"):  # where the old repository had it
        given.setdefault("max_queue_size", str(policy["max_queue_size"]))
    options = read(given)
    return options, bool(model.get("model_transaction_policy", {}).get("decoupled"))


def one_of(name: str, choices: tuple[str, ...] | Mapping[str, str]) -> Callable[[str], dict[str, Any]]:
    def read_choice(raw: str) -> dict[str, Any]:
        if raw.lower() not in choices:
            raise InvalidArgument(f"{raw!r} is not supported; it may be {', '.join(choices)}")
        return {name: choices[raw.lower()]} if isinstance(choices, Mapping) else {}

    return read_choice


def number(
    name: str, convert: Callable[[str], Any], low: float, high: float
) -> Callable[[str], dict[str, Any]]:
    def read_number(raw: str) -> dict[str, Any]:
        try:
            value = convert(raw)
        except ValueError as e:
            raise InvalidArgument(f"{raw!r} is no number") from e
        if not low <= value <= high:
            raise InvalidArgument(f"{raw} must be from {low} to {high}")
        return {name: value}

    return read_number


def read_echo(raw: str) -> dict[str, Any]:
    if raw.lower() not in ("true", "1", "false", "0"):
        raise InvalidArgument(f"{raw!r} must be true or false")
    return {"echo": raw.lower() in ("false", "0")}


MANY = 1 << 62
READERS: dict[str, Callable[[str], dict[str, Any]]] = {
    "gpt_model_type": one_of("", BATCHING),
    "gpt_model_path": lambda raw: {"engine_path": Path(raw)},
    "engine_model": lambda raw: {"engine_model": raw},
    "max_tokens_in_paged_kv_cache": number("tokens", int, 1, MANY),
    "kv_cache_free_gpu_mem_fraction": number("memory_fraction", float, 0.001, 1.0),
    "batch_scheduler_policy": one_of("policy", POLICIES),
    "exclude_input_in_output": read_echo,
    "decoding_mode": one_of("", DECODING_MODES),
    "max_queue_size": number("queue", int, 0, MANY),
    "max_num_tokens": number("max_num_tokens", int, 1, MANY),
    "default_deadline_ms": number("deadline_ms", int, 1, MANY),
}
