"""JSON over HTTP to a Triton server, straight to it: a proxy of the environment has no business there."""

import json
import urllib.error
import urllib.request
from http.client import HTTPResponse
from typing import Any, cast

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def open_url(url: str, body: dict[str, Any] | None = None, *, timeout: float) -> HTTPResponse:
    """GET, or POST if there is a body. Raises urllib.error.HTTPError from status 400 on, else OSError."""
    data = None if body is None else json.dumps(body).encode()
    return cast(HTTPResponse, _opener.open(urllib.request.Request(url, data), timeout=timeout))


def call(url: str, body: dict[str, Any] | None = None, *, timeout: float = 30) -> Any:
    """The answer's JSON."""
    with open_url(url, body, timeout=timeout) as response:
        return json.load(response)


def error_text(error: urllib.error.HTTPError) -> str:
    """What the server says in the body of a refused request."""
    body = error.read().decode(errors="replace").removeprefix("data:")  # generate_stream answers as a stream
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return f"{error} {body}".strip()
