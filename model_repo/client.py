"""A client: one prompt to a running server, its text as it arrives. gRPC through tritonclient, or plain HTTP.

for text in send("grpc://127.0.0.1:8001", Prompt("Hello", max_tokens=16)):
    print(text, end="")
"""

import json
import queue
import urllib.error
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import TYPE_CHECKING, Any

from trtforge.model_repo import http_api
from trtforge.plugins.errors import ForgeError, InvalidArgument

if TYPE_CHECKING:
    from tritonclient.grpc import InferenceServerClient, InferInput

TEXT_MODEL = "ensemble"
CONNECT_TIMEOUT = 10.0  # seconds


@dataclass(frozen=True)
class Prompt:
    """What is asked. chat: the text is a user's turn, rendered with the model's own chat template.

    options: further inputs of the text model by name (temperature, top_p, top_k, seed, stop_words, ...).
    """

    text: str
    max_tokens: int = 128
    chat: bool = False
    stream: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)

    def inputs(self, decoupled: bool) -> dict[str, Any]:
        """Input name -> value; a model that is not decoupled answers once, whatever is wished."""
        inputs: dict[str, Any] = {"max_tokens": self.max_tokens, "stream": self.stream and decoupled}
        if self.chat:
            inputs["messages"] = json.dumps([{"role": "user", "content": self.text}])
        else:
            inputs["text_input"] = self.text
        return {**inputs, **self.options}


def send(url: str, prompt: Prompt, model: str = TEXT_MODEL) -> Iterator[str]:
    """The pieces of the answer as they arrive. url: grpc://host:port (or only host:port) or http://host:port.

    Raises ForgeError with the server's own message, or with what keeps it from answering. A reader that stops
    early cancels the request.
    """
    scheme, separator, address = url.rpartition("://")
    if not separator or scheme == "grpc":
        return _send_grpc(address, prompt, model)
    if scheme == "http":
        return _send_http(url.rstrip("/"), prompt, model)
    raise InvalidArgument(f"{url}: give grpc://host:port or http://host:port")


def _unreachable(url: str, reason: object) -> ForgeError:
    return ForgeError(f"nothing answers at {url} ({reason}); is `trtforge serve` running there?")


# --- gRPC


def _send_grpc(address: str, prompt: Prompt, model: str) -> Iterator[str]:
    import tritonclient.grpc as triton
    from tritonclient.utils import InferenceServerException

    answers: queue.Queue[tuple[Any, InferenceServerException | None]] = queue.Queue()
    try:
        with triton.InferenceServerClient(address) as client:
            tensors = _tensors(client, prompt, model)
            client.start_stream(callback=lambda result, error: answers.put((result, error)))
            try:
                client.async_stream_infer(model, tensors, enable_empty_final_response=True)
                yield from _pieces(answers.get)
            finally:
                client.stop_stream(cancel_requests=True)
    except InferenceServerException as e:
        if e.status() == "StatusCode.UNAVAILABLE":
            raise _unreachable(f"grpc://{address}", "connection refused or lost") from e
        raise ForgeError(e.message()) from e


def _tensors(client: "InferenceServerClient", prompt: Prompt, model: str) -> "list[InferInput]":
    """The prompt's values as tensors [1, n] of the types that the model itself declares."""
    import numpy as np
    import tritonclient.grpc as triton
    from tritonclient.utils import triton_to_np_dtype

    config = client.get_model_config(model, client_timeout=CONNECT_TIMEOUT).config
    metadata = client.get_model_metadata(model, client_timeout=CONNECT_TIMEOUT)
    datatypes = {declared.name: declared.datatype for declared in metadata.inputs}
    tensors = []
    for name, value in prompt.inputs(config.model_transaction_policy.decoupled).items():
        if name not in datatypes:
            raise InvalidArgument(f"model {model} has no input {name}")
        values = value if isinstance(value, list | tuple) else [value]
        if datatypes[name] == "BYTES":
            array = np.array([[str(v).encode() for v in values]], dtype=np.object_)
        else:
            array = np.array([values], dtype=triton_to_np_dtype(datatypes[name]))
        tensor = triton.InferInput(name, list(array.shape), datatypes[name])
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    return tensors


def _pieces(receive: "Callable[[], tuple[Any, Exception | None]]") -> Iterator[str]:
    while True:
        result, error = receive()
        if error is not None:
            raise error
        text = result.as_numpy("text_output")
        if text is not None and len(text):
            yield text[0].decode()
        if result.get_response().parameters["triton_final_response"].bool_param:
            return


# --- HTTP


def _send_http(url: str, prompt: Prompt, model: str) -> Iterator[str]:
    base = f"{url}/v2/models/{model}"
    try:
        config = http_api.call(f"{base}/config", timeout=CONNECT_TIMEOUT)
        inputs = prompt.inputs(config.get("model_transaction_policy", {}).get("decoupled", False))
        if not inputs["stream"]:
            yield _text(http_api.call(f"{base}/generate", inputs, timeout=3600))
            return
        with http_api.open_url(f"{base}/generate_stream", inputs, timeout=3600) as response:
            for line in response:
                if line.startswith(b"data:"):
                    yield _text(json.loads(line.removeprefix(b"data:")))
    except urllib.error.HTTPError as e:
        raise ForgeError(http_api.error_text(e)) from e
    except OSError as e:
        raise _unreachable(url, getattr(e, "reason", e)) from e
    except (HTTPException, ValueError) as e:  # the gRPC and the metrics port answer, but not with JSON
        raise ForgeError(f"{url}: not Triton's HTTP port; `trtforge serve` printed which that is") from e


def _text(answer: Mapping[str, Any]) -> str:
    if "error" in answer:  # Triton's way of failing inside a response with status 200
        raise ForgeError(str(answer["error"]))
    return str(answer.get("text_output", ""))
