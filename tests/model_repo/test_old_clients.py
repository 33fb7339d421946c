"""Requests as clients of the old repository send them, over real tritonclient and plain HTTP, in both policies."""

import json
import queue
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shm
from served import Served, stream_infer, tensor, text
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

pytestmark = pytest.mark.slow

PROMPT = "What is machine learning?"


# --- README curl, vLLM's, TRT-LLM's and SGLang's benchmarks: plain HTTP


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls", "flat_ensemble", "flat_tensorrt_llm_bls"])
def test_readme_curl(served: Served, model: str) -> None:
    body = b'{"text_input": "What is machine learning?", "max_tokens": 20, "bad_words": "", "stop_words": ""}'
    answer = served.generate(model, body)
    assert answer["text_output"] == served.alone(PROMPT, 20).text
    assert answer["finish_reason"] == "length"


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"min_length": 24},
        {"ignore_eos": True},
        {"temperature": 1e-6, "min_length": 24, "end_id": 1048576},  # SGLang
    ],
)
def test_serving_benchmarks(served: Served, model: str, extra: dict[str, Any]) -> None:
    payload = {
        "accumulate_tokens": True,
        "text_input": PROMPT,
        "temperature": 0.0,
        "top_p": 1.0,
        "max_tokens": 24,
        "stream": True,
        **extra,
    }
    lines = served.stream(model, payload)
    assert "".join(line["text_output"] for line in lines) == served.alone(PROMPT, 24).text
    assert len(lines) == 24


def test_streams_are_refused_where_they_cannot_be(served: Served) -> None:
    status, body = served.post(
        "flat_ensemble", "generate_stream", {"text_input": "x", "max_tokens": 2, "stream": True}
    )
    assert status == 400
    assert body.startswith(
        'data: {"error":"[INVALID_ARG] stream is true, but this repository was packaged with'
    )


# --- inflight_batcher_llm_client: token ids over gRPC


def core_inputs(ids: Sequence[int], output_len: int, streaming: bool) -> list[Any]:
    make = partial(tensor, grpcclient)
    return [
        make("input_ids", np.array([ids], np.int32)),
        make("input_lengths", np.array([[len(ids)]], np.int32)),
        make("request_output_len", np.array([[output_len]], np.int32)),
        make("beam_width", np.array([[1]], np.int32)),
        make("temperature", np.array([[1.0]], np.float32)),
        make("streaming", np.array([[streaming]], bool)),
        make("end_id", np.array([[-1]], np.int32)),
        make("pad_id", np.array([[258]], np.int32)),
        make("runtime_top_k", np.array([[1]], np.int32)),
        make("runtime_top_p", np.array([[0.0]], np.float32)),
    ]


CORE_OUTPUTS = ["output_ids", "sequence_length"]


def test_inflight_batcher_llm_client_streaming(served: Served) -> None:
    ids = [5, 6, 7, 8]
    results = stream_infer(
        served,
        "tensorrt_llm",
        core_inputs(ids, 16, True),
        outputs=[grpcclient.InferRequestedOutput(n) for n in CORE_OUTPUTS],
        request_id="7",
        parameters={"Streaming": True},
    )
    tokens: list[int] = []
    for result in results:
        assert [o.name for o in result.get_response().outputs] == CORE_OUTPUTS  # it compares the set exactly
        assert result.get_response().id == "7"
        ids_out, length = result.as_numpy("output_ids"), result.as_numpy("sequence_length")
        assert ids_out.shape == (1, 1, length[0][0])
        tokens += ids_out[0][0].tolist()
    assert tuple(tokens) == served.alone(ids, 16, ignore_eos=True).token_ids


def test_inflight_batcher_llm_client_async_infer(served: Served) -> None:
    done: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(served.server.grpc_url) as client:
        for i in range(3):
            client.async_infer(
                "flat_tensorrt_llm",
                core_inputs([5, 6, 7 + i], 16, False),
                lambda result, error: done.put((result, error)),
                outputs=[grpcclient.InferRequestedOutput(n) for n in CORE_OUTPUTS],
                request_id=str(i),
                parameters={"Streaming": False},
            )
        for _ in range(3):
            result, error = done.get(timeout=30)
            assert error is None
            expected = served.alone([5, 6, 7 + int(result.get_response().id)], 16, ignore_eos=True)
            assert tuple(result.as_numpy("output_ids")[0][0]) == expected.token_ids
            assert result.as_numpy("sequence_length").tolist() == [[16]]


@pytest.mark.parametrize("model", ["tensorrt_llm", "flat_tensorrt_llm"])
def test_a_stop_request_ends_its_request_with_what_it_has(served: Served, model: str) -> None:
    """A second request with the same id, `stop` and dummy tensors; answered without outputs."""
    make = partial(tensor, grpcclient)
    stop = [
        make("input_ids", np.array([[1]], np.int32)),
        make("input_lengths", np.array([[0]], np.int32)),
        make("request_output_len", np.array([[0]], np.int32)),
        make("stop", np.array([[True]], bool)),
    ]
    results: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(served.server.grpc_url) as client:
        if model == "tensorrt_llm":
            client.start_stream(lambda result, error: results.put((result, error)))
            send = partial(client.async_stream_infer, enable_empty_final_response=True)
        else:
            send = partial(client.async_infer, callback=lambda result, error: results.put((result, error)))
        send(model_name=model, inputs=core_inputs([1, 2, 3], 1500, False), request_id="to-stop")
        served.wait_for(lambda: served.active(model) == 1, "it runs")
        send(model_name=model, inputs=stop, request_id="to-stop")
        answers = [results.get(timeout=10) for _ in range(2)]
        assert [error for _, error in answers] == [None, None]
        (ended,) = [r for r, _ in answers if r.get_response().outputs]
        tokens = tuple(ended.as_numpy("output_ids")[0][0].tolist())
        assert 0 < len(tokens) < 1500
        assert tokens == served.alone([1, 2, 3], 1500, ignore_eos=True).token_ids[: len(tokens)]
        send(model_name=model, inputs=stop, request_id="nobody")  # an unknown id is a success
        result, error = results.get(timeout=10)
        assert error is None and not result.get_response().outputs
        send(model_name=model, inputs=stop)
        _, error = results.get(timeout=10)
        assert "[INVALID_ARG] stop needs the request id" in str(error)
    served.wait_until_idle(model)


# --- end_to_end_grpc_client: text over a gRPC stream


def text_inputs(client: Any, prompts: Sequence[str], max_tokens: int, stream: bool) -> list[Any]:
    n = len(prompts)
    make = partial(tensor, client)
    return [
        make("text_input", np.array([[p] for p in prompts], dtype=object)),
        make("max_tokens", np.full((n, 1), max_tokens, np.int32)),
        make("bad_words", np.array([[""]] * n, dtype=object)),
        make("stop_words", np.array([[""]] * n, dtype=object)),
        make("stream", np.full((n, 1), stream)),
        make("beam_width", np.ones((n, 1), np.int32)),
        make("temperature", np.ones((n, 1), np.float32)),
        make("num_return_sequences", np.ones((n, 1), np.int32)),
    ]


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
@pytest.mark.parametrize("stream", [True, False])
def test_end_to_end_grpc_client(served: Served, model: str, stream: bool) -> None:
    results = stream_infer(
        served,
        model,
        [
            *text_inputs(grpcclient, [PROMPT], 12, stream),
            tensor(grpcclient, "exclude_input_in_output", np.array([[True]])),
        ],
        outputs=[grpcclient.InferRequestedOutput("text_output")],
    )
    assert len(results) == (12 if stream else 1)
    pieces = [r.as_numpy("text_output")[0].decode() for r in results]
    assert "".join(pieces) == served.alone(PROMPT, 12).text


def test_a_batch_of_prompts_is_split(served: Served) -> None:
    prompts = ["one", "two, longer", "three"]
    results = stream_infer(served, "ensemble", text_inputs(grpcclient, prompts, 6, True))
    texts = ["", "", ""]
    for r in results:
        texts[r.as_numpy("batch_index")[0][0]] += r.as_numpy("text_output")[0].decode()
    assert texts == [served.alone(p, 6).text for p in prompts]
    with (
        grpcclient.InferenceServerClient(served.server.grpc_url) as client,
        pytest.raises(InferenceServerException, match=r"\[INVALID_ARG\] batch size 3"),
    ):
        client.infer("flat_ensemble", text_inputs(grpcclient, prompts, 6, False))


def test_one_bad_prompt_of_a_batch_fails_the_request_and_frees_the_others(served: Served) -> None:
    with pytest.raises(InferenceServerException, match=r"\[INVALID_ARG\] .*2048"):
        stream_infer(served, "ensemble", text_inputs(grpcclient, ["y" * 3000, "fine", "fine too"], 500, True))
    served.wait_until_idle()


# --- end_to_end_test: unary infer through all five models, all texts equal


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_end_to_end_test(served: Served, protocol: str) -> None:
    module: Any = httpclient if protocol == "http" else grpcclient
    url = served.server.http_url.removeprefix("http://") if protocol == "http" else served.server.grpc_url
    make = partial(tensor, module)
    with module.InferenceServerClient(url) as client:
        pre = client.infer(
            "flat_preprocessing",
            [
                make("QUERY", text(PROMPT)),
                make("BAD_WORDS_DICT", text("")),
                make("STOP_WORDS_DICT", text("")),
                make("REQUEST_OUTPUT_LEN", np.array([[17]], np.int32)),
            ],
        )
        ids, length = pre.as_numpy("INPUT_ID"), pre.as_numpy("REQUEST_INPUT_LEN")
        core = client.infer(
            "flat_tensorrt_llm",
            [
                make("input_ids", ids),
                make("decoder_input_ids", ids),
                make("input_lengths", length),
                make("request_output_len", pre.as_numpy("REQUEST_OUTPUT_LEN")),
                make("bad_words_list", pre.as_numpy("BAD_WORDS_IDS")),
                make("stop_words_list", pre.as_numpy("STOP_WORDS_IDS")),
                make("embedding_bias", pre.as_numpy("EMBEDDING_BIAS")),
                make("end_id", pre.as_numpy("OUT_END_ID")),
                make("pad_id", pre.as_numpy("OUT_PAD_ID")),
                make("beam_width", np.array([[1]], np.int32)),
                make("streaming", np.array([[False]])),
            ],
        )
        post = client.infer(
            "flat_postprocessing",
            [
                make("TOKENS_BATCH", core.as_numpy("output_ids")),
                make("SEQUENCE_LENGTH", core.as_numpy("sequence_length")),
            ],
        )
        whole = [
            client.infer(m, text_inputs(module, [PROMPT], 17, False)).as_numpy("text_output")[0].decode()
            for m in ("flat_ensemble", "flat_tensorrt_llm_bls")
        ]
    expected = served.alone(PROMPT, 17).text
    assert [post.as_numpy("OUTPUT")[0].decode(), *whole] == [expected] * 3


# --- the NGC OpenAI front end


@pytest.mark.parametrize("model", ["tensorrt_llm_bls", "ensemble"])
@pytest.mark.parametrize("stream", [True, False])
def test_openai_front_end(served: Served, model: str, stream: bool) -> None:
    make = partial(tensor, grpcclient)
    results = stream_infer(
        served,
        model,
        [
            make("text_input", text(PROMPT)),
            make("stream", np.array([[stream]])),
            make("max_tokens", np.array([[10]], np.int32)),
            make("stop_words", np.array([["", "zz"]], dtype=object)),
            make("top_p", np.array([[1.0]], np.float32)),
            make("temperature", np.array([[0.0]], np.float32)),
            make("seed", np.array([[0]], np.uint64)),
            make("frequency_penalty", np.array([[0.0]], np.float32)),
            make("presence_penalty", np.array([[0.0]], np.float32)),
            make("repetition_penalty", np.array([[1.0]], np.float32)),
            make("return_num_input_tokens", np.array([[True]])),
            make("return_num_output_tokens", np.array([[True]])),
        ],
    )
    assert all(r.as_numpy("text_output").shape == (1,) for r in results)
    expected = served.alone(PROMPT, 10)
    assert "".join(r.as_numpy("text_output")[0].decode() for r in results) == expected.text
    assert sum(r.as_numpy("num_output_tokens")[0][0] for r in results) == 10
    assert {r.as_numpy("num_input_tokens")[0][0] for r in results} == {expected.num_prompt_tokens}
    assert results[-1].as_numpy("finish_reason")[0] == b"length"


# --- transports and outputs


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_shared_memory_inputs(served: Served, protocol: str) -> None:
    module: Any = httpclient if protocol == "http" else grpcclient
    url = served.server.http_url.removeprefix("http://") if protocol == "http" else served.server.grpc_url
    prompt = serialize_byte_tensor(text("from shared memory"))
    tokens = np.array([[9]], np.int32)
    sizes = len(prompt.item()), tokens.nbytes
    region = shm.create_shared_memory_region("in", "/trtforge_test_in", sum(sizes))
    try:
        shm.set_shared_memory_region(region, [prompt])
        shm.set_shared_memory_region(region, [tokens], offset=sizes[0])
        with module.InferenceServerClient(url) as client:
            client.register_system_shared_memory("in", "/trtforge_test_in", sum(sizes))
            declared = (("text_input", "BYTES"), ("max_tokens", "INT32"))
            inputs = [module.InferInput(name, [1, 1], dtype) for name, dtype in declared]
            inputs[0].set_shared_memory("in", sizes[0])
            inputs[1].set_shared_memory("in", sizes[1], offset=sizes[0])
            result = client.infer("flat_ensemble", inputs)
            client.unregister_system_shared_memory("in")
        assert result.as_numpy("text_output")[0].decode() == served.alone("from shared memory", 9).text
    finally:
        shm.destroy_shared_memory_region(region)


def test_http_async_infer(served: Served) -> None:
    url = served.server.http_url.removeprefix("http://")
    with httpclient.InferenceServerClient(url, concurrency=4) as client:
        prompts = [f"prompt {i}" for i in range(4)]
        running = [
            client.async_infer("flat_ensemble", text_inputs(httpclient, [p], 8, False)) for p in prompts
        ]
        texts = [r.get_result(timeout=30).as_numpy("text_output")[0].decode() for r in running]
    assert texts == [served.alone(p, 8).text for p in prompts]


def test_echo_log_probs_and_performance(served: Served) -> None:
    expected = served.alone("hello", 5, logprobs=0)
    body = {
        "text_input": "hello",
        "max_tokens": 5,
        "exclude_input_in_output": False,
        "return_log_probs": True,
    }
    answer = served.generate("ensemble", {**body, "return_perf_metrics": True})
    assert answer["text_output"] == "hello" + expected.text
    log_probs = [t.logprob for t in expected.logprobs]
    assert answer["output_log_probs"] == pytest.approx(log_probs, rel=1e-5)
    assert answer["cum_log_probs"] == pytest.approx(sum(log_probs), rel=1e-5)
    assert answer["kv_cache_alloc_total_blocks"] == answer["kv_cache_alloc_new_blocks"] == 1
    times = [answer[f"{n}_time_ns"] for n in ("arrival", "first_scheduled", "first_token", "last_token")]
    assert times == sorted(times) and times[0] > 0
    core = {"input_ids": [1, 2, 3], "input_lengths": 3, "request_output_len": 4}
    echoed = served.generate("tensorrt_llm", {**core, "exclude_input_in_output": False})
    assert echoed["output_ids"] == [1, 2, 3, *served.alone([1, 2, 3], 4).token_ids]
    assert echoed["sequence_length"] == 7


def test_stop_and_bad_words(served: Served) -> None:
    whole = served.alone("stop here", 40).text
    word = whole[9:12]
    answer = served.generate("ensemble", {"text_input": "stop here", "max_tokens": 40, "stop_words": word})
    assert (answer["text_output"], answer["finish_reason"], answer["stop_reason"]) == (
        whole[: whole.index(word)],
        "stop",
        word,
    )
    lines = served.stream(
        "ensemble", {"text_input": "stop here", "max_tokens": 40, "stop_words": word, "stream": True}
    )
    assert "".join(x["text_output"] for x in lines) == whole[: whole.index(word)]
    bad = served.generate("ensemble", {"text_input": "stop here", "max_tokens": 40, "bad_words": [whole[0]]})
    assert whole[0] not in bad["text_output"]
    liked = {"embedding_bias_words": ["q"], "embedding_bias_weights": [50.0]}
    assert (
        served.generate("ensemble", {"text_input": "x", "max_tokens": 6, **liked})["text_output"] == "qqqqqq"
    )


def test_a_token_level_stop_list(served: Served) -> None:
    ids = list(served.alone([3, 4], 30).token_ids)
    at = next(i for i in range(2, 28) if ids[i : i + 2] not in [ids[j : j + 2] for j in range(i)])
    pair = ids[at : at + 2]
    make = partial(tensor, grpcclient)
    with grpcclient.InferenceServerClient(served.server.grpc_url) as client:
        result = client.infer(
            "flat_tensorrt_llm",
            [
                make("input_ids", np.array([[3, 4]], np.int32)),
                make("input_lengths", np.array([[2]], np.int32)),
                make("request_output_len", np.array([[30]], np.int32)),
                make("stop_words_list", np.array([[pair, [2, -1]]], np.int32)),
            ],
        )
    assert result.as_numpy("finish_reason")[0] == b"stop"
    assert result.as_numpy("output_ids")[0][0].tolist()[:at] == ids[:at]


def test_an_answer_may_be_empty(served: Served) -> None:
    """The end token itself is not given out; the last response of a stream may have no token."""
    first = served.alone([3, 4], 1).token_ids[0]
    make = partial(tensor, grpcclient)
    inputs = [
        make("input_ids", np.array([[3, 4]], np.int32)),
        make("input_lengths", np.array([[2]], np.int32)),
        make("request_output_len", np.array([[30]], np.int32)),
        make("streaming", np.array([[True]])),
        make("end_id", np.array([[first]], np.int32)),
    ]
    (result,) = stream_infer(served, "tensorrt_llm", inputs)
    assert result.as_numpy("output_ids").shape == (1, 1, 0)
    assert result.as_numpy("sequence_length").tolist() == [[0]]
    assert result.as_numpy("stop_reason")[0].decode() == str(first)
    body = {"text_input": "x", "max_tokens": 9, "end_id": served.alone("x", 1).token_ids[0]}
    assert served.generate("ensemble", body)["text_output"] == ""


def test_messages(served: Served) -> None:
    turns = [{"role": "user", "content": "Hi"}]
    body = {"messages": json.dumps(turns), "max_tokens": 8, "return_num_input_tokens": True}
    answer = served.generate("ensemble", body)
    rendered = served.engine.tokenizer.encode_messages(turns)
    assert answer["num_input_tokens"] == len(rendered)
    assert answer["text_output"] == served.alone(rendered, 8).text


def test_unseeded_samples_differ_and_seeded_ones_do_not(served: Served) -> None:
    body = {"text_input": "dice", "max_tokens": 24, "top_p": 1.0}
    unseeded = {served.generate("ensemble", body)["text_output"] for _ in range(4)}
    assert len(unseeded) > 1
    seeded = {served.generate("ensemble", {**body, "random_seed": 5})["text_output"] for _ in range(3)}
    assert len(seeded) == 1
