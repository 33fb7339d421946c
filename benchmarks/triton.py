"""What Triton costs: streamed responses per second with an engine that takes no time, and the share of an engine's
own speed that is left through Triton.

    python benchmarks/triton.py                    # the null engine only
    python benchmarks/triton.py --engine ENGINE    # and a real one: Triton's tokens per second over generate's

Prints a table and one JSON line. The client is one thread over raw sockets, since it shares the cores with the
server; it counts `data:` lines of `generate_stream` (Server-Sent Events) and keeps their bytes.
"""

import argparse
import json
import selectors
import socket
import tempfile
import time
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trtforge.model_repo.package import package
from trtforge.model_repo.serve import TritonServer
from trtforge.runtime.engine import Engine, EngineConfig
from trtforge.runtime.executors.null import write_null_engine
from trtforge.runtime.manifest import Limits
from trtforge.runtime.request import GenerationRequest, SamplingParams

STREAMS = 16
PROMPT = "Tell me something about the sea, the sky and number {i}."


def stream_all(
    server: TritonServer, model: str, bodies: Sequence[dict[str, Any]]
) -> tuple[float, list[bytes]]:
    """Send all requests at once and read their streams to the end: (seconds, what each received)."""
    host = urllib.parse.urlsplit(server.http_url)
    received = [bytearray() for _ in bodies]
    with selectors.DefaultSelector() as waiting:
        start = time.perf_counter()
        for i, body in enumerate(bodies):
            connection = socket.create_connection((host.hostname, host.port))
            raw = json.dumps(body).encode()
            head = f"POST /v2/models/{model}/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
            connection.sendall(head.encode() + raw)
            waiting.register(connection, selectors.EVENT_READ, i)
        while waiting.get_map():
            for key, _ in waiting.select():
                assert isinstance(key.fileobj, socket.socket)
                data = key.fileobj.recv(1 << 16)
                received[key.data] += data
                if not data or received[key.data].endswith(b"\r\n0\r\n\r\n"):
                    waiting.unregister(key.fileobj)
                    key.fileobj.close()
        seconds = time.perf_counter() - start
    for i, answer in enumerate(received):
        assert answer.startswith(b"HTTP/1.1 200") and b'"error"' not in answer, (i, bytes(answer[:500]))
    return seconds, [bytes(r) for r in received]


def bodies(model: str, streams: int, tokens: int) -> list[dict[str, Any]]:
    if model == "tensorrt_llm":
        options = {"request_output_len": tokens, "streaming": True, "ignore_eos": True}
        return [{"input_ids": [1, 2, 3, i], "input_lengths": 4, **options} for i in range(streams)]
    options = {"max_tokens": tokens, "stream": True, "ignore_eos": True}
    return [{"text_input": PROMPT.format(i=i), **options} for i in range(streams)]


def responses_per_second(scratch: Path, streams: int, tokens: int) -> dict[str, float]:
    """Through each model over the null engine, the best of three."""
    write_null_engine(scratch / "null", Limits(max_batch_size=streams))
    package(scratch / "null", scratch / "null-repository")
    results = {}
    with TritonServer(scratch / "null-repository") as server:
        for model in ("tensorrt_llm", "ensemble"):
            best = 0.0
            for _ in range(3):
                seconds, answers = stream_all(server, model, bodies(model, streams, tokens))
                responses = sum(a.count(b"data: ") for a in answers)
                assert responses == streams * tokens, responses
                best = max(best, responses / seconds)
            results[model] = best
    return results


def generate(engine_dir: Path, streams: int, tokens: int) -> float:
    """Tokens per second of the engine without Triton, on the requests that `ensemble` gets; after one to warm up."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    with Engine.open(engine_dir, EngineConfig()) as engine:
        engine.submit(GenerationRequest("warm", prompt="Hello", params=SamplingParams(max_tokens=4))).result()
        start = time.perf_counter()
        requests = [
            GenerationRequest(str(i), prompt=PROMPT.format(i=i), params=params) for i in range(streams)
        ]
        running = [engine.submit(r) for r in requests]
        total = sum(len(r.result().token_ids) for r in running)
        return total / (time.perf_counter() - start)


def through_triton(engine_dir: Path, repository: Path, streams: int, tokens: int) -> float:
    package(engine_dir, repository)
    with TritonServer(repository) as server:
        stream_all(server, "ensemble", bodies("ensemble", 1, 4))
        seconds, answers = stream_all(server, "ensemble", bodies("ensemble", streams, tokens))
    assert sum(a.count(b"data: ") for a in answers) == streams * tokens
    return streams * tokens / seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", type=Path, help="an engine directory; its tokens per second are compared")
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--tokens", type=int, default=100, help="of each stream")
    parser.add_argument(
        "--rounds", type=int, default=3, help="of the comparison; the best of each side counts"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        null = responses_per_second(Path(scratch), args.streams, args.tokens)
        result: dict[str, Any] = {"streams": args.streams, "responses_per_s": null}
        print(f"{args.streams} streams of {args.tokens} tokens each")
        for model, rate in null.items():
            print(f"  null engine, {model:14s} {rate:8.0f} responses/s")
        if args.engine:
            alone, served = [], []
            for _ in range(args.rounds):
                alone.append(generate(args.engine, args.streams, args.tokens))
                served.append(
                    through_triton(args.engine, Path(scratch) / "repository", args.streams, args.tokens)
                )
            result |= {"generate_tokens_per_s": max(alone), "triton_tokens_per_s": max(served)}
            result["triton_over_generate"] = max(served) / max(alone)
            print(f"  generate             {max(alone):8.1f} tokens/s")
            print(
                f"  Triton, ensemble     {max(served):8.1f} tokens/s  ({result['triton_over_generate']:.2f} of it)"
            )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
