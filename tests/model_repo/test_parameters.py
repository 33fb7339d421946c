"""The parameters of config.pbtxt: honoured, ignored or refused by name."""

import json

import pytest

from trtforge.model_repo.parameters import faults, of_model, read
from trtforge.plugins.errors import InvalidArgument


def test_honoured() -> None:
    options = read(
        {
            "gpt_model_type": "inflight_fused_batching",
            "max_tokens_in_paged_kv_cache": "1024",
            "batch_scheduler_policy": "guaranteed_no_evict",
            "exclude_input_in_output": "False",
            "max_queue_size": "7",
            "default_deadline_ms": "500",
            "cuda_graph_mode": "true",
            "executor_worker_path": "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker",
            "lora_cache_max_adapter_size": "",
            "max_beam_width": "1",
        }
    )
    assert (options.echo, options.deadline_ms) == (True, 500)
    config = options.engine_config(bytes_per_token=1024)
    assert (config.kv_cache_tokens, config.policy, config.max_queue_requests) == (
        1024,
        "guaranteed_no_evict",
        7,
    )


def test_the_smaller_of_two_pool_sizes_counts() -> None:
    both = {"max_tokens_in_paged_kv_cache": "10", "kv_cache_free_gpu_mem_fraction": "0.9"}
    assert read(both).engine_config(1024).kv_cache_tokens == 10
    alone = read({"kv_cache_free_gpu_mem_fraction": "0.5"}).engine_config(1024).kv_cache_tokens
    assert alone is not None and alone > 1024
    assert read({"max_queue_size": "0"}).engine_config(1).max_queue_requests is None


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("gpt_model_type", "V1", "'V1' is not supported"),
        ("gpt_model_path", "${engine_dir}", "was never filled in"),
        ("decoding_mode", "medusa", "not supported"),
        ("max_beam_width", "4", "there is no beam search"),
        ("lora_prefetch_dir", "/adapters", "LoRA adapters are not done yet"),
        ("kv_cache_free_gpu_mem_fraction", "90", "from 0.001 to 1.0"),
        ("max_tokens_in_paged_kv_cache", "many", "is no number"),
        ("exclude_input_in_output", "perhaps", "must be true or false"),
        ("batch_scheduler_polcy", "x", "did you mean 'batch_scheduler_policy'"),
    ],
)
def test_faults(key: str, value: str, message: str) -> None:
    ((named, said),) = faults({key: value})
    assert named == key and message in said
    with pytest.raises(InvalidArgument, match=f"parameter {key}: "):
        read({key: value})


def test_the_queue_bound_where_the_old_repository_had_it() -> None:
    config = {
        "dynamic_batching": {"default_queue_policy": {"max_queue_size": 9}},
        "model_transaction_policy": {"decoupled": True},
        "parameters": {"gpt_model_path": {"string_value": "e"}},
    }
    options, decoupled = of_model(json.dumps(config))
    assert (options.queue, decoupled, str(options.engine_path)) == (9, True, "e")
