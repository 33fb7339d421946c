"""What clients do wrong, and what breaks in the engine: a clear error with its code word and status; nothing leaks."""

import json
import queue
import threading
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from served import LIMITS, Companion, Served, tensor, text
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.slow


def error(status_and_text: tuple[int, str]) -> tuple[int, str]:
    status, body = status_and_text
    return status, json.loads(body.removeprefix("data: "))["error"]


GOOD = {"text_input": "x", "max_tokens": 3}
CORE = {"input_ids": [1], "request_output_len": 3}
STORM: list[tuple[str, dict[str, Any] | bytes, str]] = [
    ("ensemble", {"max_tokens": 3}, "[INVALID_ARG] text_input is missing"),
    ("ensemble", {"text_input": "x"}, "[INVALID_ARG] max_tokens is missing"),
    ("ensemble", {**GOOD, "max_tokens": -1}, "[INVALID_ARG] max_tokens must be > 0, got -1"),
    ("ensemble", {**GOOD, "max_tokens": 0}, "[INVALID_ARG] max_tokens must be > 0, got 0"),
    (
        "ensemble",
        {**GOOD, "max_token": 3},
        "[INVALID_ARG] unknown key 'max_token': did you mean 'max_tokens'?",
    ),
    ("ensemble", {**GOOD, "lora_task_id": 1}, "[INVALID_ARG] lora_task_id is not supported"),
    (
        "ensemble",
        {**GOOD, "beam_width": 4},
        "[INVALID_ARG] beam_width 4 is not supported: there is no beam search",
    ),
    (
        "ensemble",
        {**GOOD, "num_return_sequences": 2},
        "[INVALID_ARG] num_return_sequences 2 is not supported",
    ),
    ("ensemble", {**GOOD, "return_context_logits": True}, "[INVALID_ARG] return_context_logits True is not"),
    ("ensemble", {**GOOD, "messages": "[]"}, "[INVALID_ARG] give text_input or messages, not both"),
    ("ensemble", {"max_tokens": 3, "messages": "hello"}, "[INVALID_ARG] messages is not JSON"),
    (
        "ensemble",
        {
            "max_tokens": 3,
            "messages": '[{"role": "user", "content": "x", "extra": %s}]' % ("[" * 900 + "]" * 900),
        },
        "[INVALID_ARG] messages is nested more than 64 levels deep",
    ),
    ("ensemble", {"text_input": "y" * 3000, "max_tokens": 3}, "[INVALID_ARG] "),
    ("ensemble", {**GOOD, "repetition_penalty": 0.0}, "[INVALID_ARG] repetition_penalty must be"),
    (
        "ensemble",
        b'{"text_input": "\xff\xfe", "max_tokens": 3}',
        "",
    ),  # Triton's own JSON reader may refuse it
    (
        "tensorrt_llm_bls",
        {**GOOD, "num_draft_tokens": 2},
        "[INVALID_ARG] num_draft_tokens 2 is not supported",
    ),
    ("tensorrt_llm", {"request_output_len": 3}, "[INVALID_ARG] input_ids is missing"),
    ("tensorrt_llm", {**CORE, "input_lengths": 2}, "[INVALID_ARG] input_lengths must"),
    (
        "tensorrt_llm",
        {"input_ids": [9999], "request_output_len": 3},
        "[INVALID_ARG] token_ids: 9999 is not in",
    ),
    ("tensorrt_llm", {**CORE, "top_k": 1}, "[INVALID_ARG] unknown key 'top_k': did"),
    (
        "tensorrt_llm",
        {**CORE, "stop_words_list": [-5, 6, 2, -1]},
        "[INVALID_ARG] stop_words_list: token -5 is not in the vocabulary of 259",
    ),
    (
        "tensorrt_llm",
        {**CORE, "stop_words_list": [999, 6, 2, -1]},
        "[INVALID_ARG] stop_words_list: token 999 is not in the vocabulary of 259",
    ),
    ("tensorrt_llm", {**CORE, "embedding_bias": [1.0]}, "[INVALID_ARG] embedding_bias"),
    (
        "preprocessing",
        {"QUERY": "x", "REQUEST_OUTPUT_LEN": 3, "BAD_WORD_DICT": "y"},
        "[INVALID_ARG] unknown key 'BAD_WORD_DICT': did you mean 'BAD_WORDS_DICT'?",
    ),
    (
        "postprocessing",
        {"TOKENS_BATCH": [104], "SEQUENCE_LENGTH": 1, "sequence_length": 2},
        "[INVALID_ARG] unknown key 'sequence_length': did you mean 'SEQUENCE_LENGTH'?",
    ),
]


def test_a_storm_of_bad_requests(served: Served, companion: Companion) -> None:
    """Many at once, each answered; the request that runs beside them is not disturbed."""
    answers: list[Any] = [None] * len(STORM)

    def send(i: int) -> None:
        model, body, _ = STORM[i]
        answers[i] = error(served.post(model, "generate_stream" if i % 2 else "generate", body))

    threads = [threading.Thread(target=send, args=(i,)) for i in range(len(STORM))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for (status, message), (_, _, expected) in zip(answers, STORM, strict=True):
        assert status in (400, 500) if not expected else status == 400, (status, message, expected)
        assert message.startswith(expected)
        assert "\n" not in message
    assert served.generate("ensemble", GOOD)["text_output"] == served.alone("x", 3).text


def infer(served: Served, model: str, **tensors: Any) -> Any:
    inputs = [tensor(grpcclient, name, array) for name, array in tensors.items()]
    with grpcclient.InferenceServerClient(served.server.grpc_url) as client:
        return client.infer(model, inputs)


def infer_json(tensors: dict[str, tuple[str, list[int], list[Any]]]) -> dict[str, Any]:
    return {"inputs": [{"name": n, "datatype": d, "shape": s, "data": v} for n, (d, s, v) in tensors.items()]}


def test_statuses_of_infer(served: Served) -> None:
    """On /infer and unary gRPC the code is a status, and the text the same."""
    good = {"text_input": ("BYTES", [1, 1], ["x"]), "max_tokens": ("INT32", [1, 1], [-4])}
    assert error(served.post("flat_ensemble", "infer", infer_json(good))) == (
        400,
        "[INVALID_ARG] max_tokens must be > 0, got -4",
    )
    unknown = {**good, "max_tokens": ("INT32", [1, 1], [4]), "prompt": ("BYTES", [1, 1], ["x"])}
    status, message = error(served.post("flat_ensemble", "infer", infer_json(unknown)))
    assert status == 400 and "unexpected inference input 'prompt'" in message
    broken = np.array([[b"\xff"]], dtype=object)
    for prompt, tokens, message in (
        (text("x"), -4, "[INVALID_ARG] max_tokens must be > 0, got -4"),
        (broken, 4, "[INVALID_ARG] text_input is not valid UTF-8"),
    ):
        with pytest.raises(InferenceServerException) as raised:
            infer(served, "flat_ensemble", text_input=prompt, max_tokens=np.array([[tokens]], np.int32))
        assert raised.value.status() == "StatusCode.INVALID_ARGUMENT"
        assert raised.value.message().startswith(message)


def test_the_tokenizers_models(served: Served) -> None:
    words = {"QUERY": text("x"), "REQUEST_OUTPUT_LEN": np.array([[3]], np.int32)}
    words["BAD_WORDS_DICT"] = np.array([["ab"] * 1025], dtype=object)
    for tensors, message in (
        (words, "[INVALID_ARG] BAD_WORDS_DICT has 1025 entries; there may be 1024"),
        (
            {"QUERY": text("x" * 100_000), "REQUEST_OUTPUT_LEN": words["REQUEST_OUTPUT_LEN"]},
            "[INVALID_ARG] the text has",
        ),
        ({"QUERY": text("x")}, "[INVALID_ARG] REQUEST_OUTPUT_LEN is missing"),
    ):
        with pytest.raises(InferenceServerException) as raised:
            infer(served, "preprocessing", **tensors)
        assert raised.value.status() == "StatusCode.INVALID_ARGUMENT"
        assert raised.value.message().startswith(message)


def test_a_parameter_is_as_good_as_its_input(served: Served) -> None:
    given = {"QUERY": text("hi"), "REQUEST_OUTPUT_LEN": np.array([[3]], np.int32)}
    inputs = [tensor(grpcclient, name, array) for name, array in given.items()]
    with grpcclient.InferenceServerClient(served.server.grpc_url) as client:
        result = client.infer("preprocessing", inputs, parameters={"END_ID": 7})
        assert result.as_numpy("OUT_END_ID").tolist() == [[7]]
        with pytest.raises(InferenceServerException, match="REQUEST_OUTPUT_LEN is given twice"):
            client.infer("preprocessing", inputs, parameters={"REQUEST_OUTPUT_LEN": 4})


def test_a_full_queue_is_unavailable(served: Served) -> None:
    tensors = [
        tensor(grpcclient, "text_input", text("x")),
        tensor(grpcclient, "max_tokens", np.array([[200]], np.int32)),
    ]
    done: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(served.server.grpc_url) as client:
        asked = LIMITS.max_batch_size + 4 + 6
        for _ in range(asked):
            client.async_infer("flat_ensemble", tensors, lambda result, error: done.put((result, error)))
        errors = [e for _, e in (done.get(timeout=30) for _ in range(asked)) if e]
    assert len(errors) == 6
    for e in errors:
        assert e.status() == "StatusCode.UNAVAILABLE"
        assert e.message().startswith("[OVERLOADED] retry_after_ms=")
    served.wait_until_idle("flat_tensorrt_llm")


def test_a_step_that_fails_ends_its_requests_and_no_others(served: Served) -> None:
    expected = served.alone("x", 200, ignore_eos=True).text
    body = {"text_input": "x", "max_tokens": 200, "ignore_eos": True}
    status, message = error(served.post("ill_ensemble", "generate", body))
    assert (status, message) == (400, "[INTERNAL] the null executor was told to fail at step 40")
    assert served.generate("ill_ensemble", body)["text_output"] == expected
    assert served.metric("trtforge_engine_healthy", "ill_tensorrt_llm") == 1
    served.wait_until_idle("ill_tensorrt_llm")


def test_a_dead_engine_fails_everything_at_once(served: Served) -> None:
    body = {"text_input": "x", "max_tokens": 400, "stream": True, "ignore_eos": True}
    results: list[str] = []
    threads = [
        threading.Thread(
            target=lambda: results.append(served.post("lost_ensemble", "generate_stream", body)[1])
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    for result in results:
        assert "[INTERNAL] the engine has failed" in result.strip().splitlines()[-1]
    for model, request in (
        ("lost_ensemble", GOOD),
        ("lost_tensorrt_llm", {"input_ids": [1], "request_output_len": 3}),
    ):
        status, message = error(served.post(model, "generate", request, timeout=1))
        assert status == 400 and message.startswith("[INTERNAL] the engine has failed"), message
    served.wait_for(lambda: served.metric("trtforge_engine_healthy", "lost_tensorrt_llm") == 0, "it says so")
    assert served.metric("trtforge_engine_healthy") == 1  # the other engines do not care
