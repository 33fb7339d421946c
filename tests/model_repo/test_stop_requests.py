"""A stop request goes to `tensorrt_llm`, whichever model of its engine the request to stop went to."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from served import Served, stream_infer, tensor

pytestmark = pytest.mark.slow


def tensors(**arrays: Any) -> list[Any]:
    return [tensor(grpcclient, name, np.array([value])) for name, value in arrays.items()]


def int32(*values: int) -> Any:
    return np.array(values, np.int32)


STOP = tensors(input_ids=int32(1), input_lengths=int32(0), request_output_len=int32(0), stop=[True])


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_a_stop_request_reaches_all_requests_of_its_id_and_engine(served: Served, model: str) -> None:
    """The old ensemble gave its request's id to tensorrt_llm. Requests of one id to two models are each answered
    what is theirs; one of another id, and one of the same id to another engine, go on."""
    served.wait_until_idle()

    def ask(to: str, id: str, prompt: str, max_tokens: int) -> str:
        words = {"text_input": np.array([prompt], object), "max_tokens": int32(max_tokens)}
        (result,) = stream_infer(served, to, tensors(**words, ignore_eos=[True]), request_id=id)
        return str(result.as_numpy("text_output")[0].decode())

    def ask_ids(id: str) -> list[int]:
        given = tensors(input_ids=int32(1, 2, 3), request_output_len=int32(1500), ignore_eos=[True])
        (result,) = stream_infer(served, "tensorrt_llm", given, request_id=id)
        ids: list[int] = result.as_numpy("output_ids")[0][0].tolist()
        return ids

    with ThreadPoolExecutor() as pool:
        text = pool.submit(ask, model, "mine", "hello", 1500)
        ids = pool.submit(ask_ids, "mine")
        other = pool.submit(ask, model, "yours", "other", 500)
        elsewhere = pool.submit(ask, "flat_ensemble", "mine", "elsewhere", 500)
        served.wait_for(lambda: served.active() == 3, "all of this engine run")
        served.wait_for(lambda: served.active("flat_tensorrt_llm") == 1, "and that of the other one")
        assert stream_infer(served, "tensorrt_llm", STOP, request_id="mine") == []
    assert 0 < len(ids.result()) < 1500
    whole_ids = served.alone([1, 2, 3], 1500, ignore_eos=True).token_ids
    assert tuple(ids.result()) == whole_ids[: len(ids.result())]
    whole = served.alone("hello", 1500, ignore_eos=True).text
    begun = text.result().rstrip("\ufffd")  # it may have been stopped inside a character
    assert begun and text.result() != whole and whole.startswith(begun)
    assert other.result() == served.alone("other", 500, ignore_eos=True).text
    assert elsewhere.result() == served.alone("elsewhere", 500, ignore_eos=True).text
    served.wait_until_idle()
