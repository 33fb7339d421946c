"""The local socket between the text models' processes and the engine's, an abstract Unix socket.

The address is derived from the server's process, so that two servers never meet and a repository can lie anywhere,
read-only too; an abstract socket leaves no file behind. Both ends check that the other one is the same user.
"""

import concurrent.futures
import itertools
import logging
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trtforge.model_repo.parse import Ask
from trtforge.model_repo.port import Deliver, EngineFacts, LocalPort, Unavailable, failed
from trtforge.model_repo.wire import (
    RemoteError,
    pack_ask,
    pack_output,
    read_frames,
    send_frame,
    unpack_ask,
    unpack_output,
)
from trtforge.plugins.errors import EngineFailure, ForgeError
from trtforge.runtime.request import RequestOutput

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.02  # between attempts to connect, and to listen while an older engine model still does
PATIENCE_SECONDS = 2.0  # after a connection was lost, or never was: the engine model may be on its way
LEAST_PATIENCE_SECONDS = 5 * RETRY_SECONDS  # it may have been loaded a moment ago
CALL_SECONDS = 10.0
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def address(engine_model: str) -> str:
    """The abstract address of an engine model within this server: all its models' processes have one parent."""
    server = os.getppid()
    started = Path(f"/proc/{server}/stat").read_text().rsplit(")", 1)[1].split()[19]
    namespace = os.readlink("/proc/self/ns/pid")  # containers may share a network, and so abstract sockets
    return f"\0trtforge/{namespace}/{server}.{started}/{engine_model}"


def same_user(connection: socket.socket) -> bool:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return bool(CREDENTIALS.unpack(raw)[1] == os.getuid())


class Writer:
    """Sends frames from a thread of its own, so that whoever has something to say never waits for the other end."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self._connection = connection
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def send(self, message: Any) -> None:
        self._queue.put(message)

    def close(self) -> None:
        self._queue.put(None)

    def _run(self) -> None:
        try:
            while (message := self._queue.get()) is not None:
                send_frame(self._connection, message)
        except OSError as e:
            log.debug("the other end went away: %s", e)  # whoever reads the connection sees it too


class Server:
    """The engine's end: accepts the text models' connections, a LocalPort for each.

    open_port: (deliver, name) -> LocalPort.
    """

    def __init__(self, where: str, open_port: Callable[[Deliver, str], LocalPort]) -> None:
        self._where = where
        self._open_port = open_port
        self._closing = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX)
        self._connections: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._accept, name="trtforge-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        for s in (self._listener, *tuple(self._connections)):
            shut(s)
        self._thread.join(timeout=5)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                self._listener.bind(self._where)
                break
            except (
                OSError
            ):  # a reload: the older engine model of this server is unloaded after this one is ready
                self._closing.wait(RETRY_SECONDS)
        number = 0
        try:
            self._listener.listen()
            while not self._closing.is_set():
                connection, _ = self._listener.accept()
                if not same_user(connection):
                    connection.close()
                    continue
                number += 1
                threading.Thread(
                    target=self._serve, args=(connection, f"s{number}"), name="trtforge-port", daemon=True
                ).start()
        except OSError as e:
            if not self._closing.is_set():
                log.error("the engine's socket failed: %s", e)

    def _serve(self, connection: socket.socket, name: str) -> None:
        self._connections.add(connection)
        writer = Writer(connection, f"trtforge-{name}")
        port = self._open_port(
            lambda outputs: writer.send({"outputs": [pack_output(o) for o in outputs]}), name
        )
        writer.send({"facts": asdict(port.facts())})
        try:
            for message in read_frames(connection):
                handle(port, message, writer)
        except OSError as e:
            log.debug("%s: %s", name, e)
        finally:
            port.close()
            self._connections.discard(connection)
            writer.close()
            connection.close()


def handle(port: LocalPort, message: dict[str, Any], writer: Writer) -> None:
    """One message of a text model."""
    op, id = message["op"], message["id"]  # the client's id for `stop`, else the request's or the call's
    if op == "submit":
        port.submit(id, unpack_ask(message["ask"]))
    elif op == "cancel":
        port.cancel(id)
    elif op == "stop":
        port.stop(id)
    else:
        try:
            result = port.encode(*message["args"]) if op == "encode" else port.decode(*message["args"])
            writer.send({"id": id, "result": result})
        except ForgeError as e:
            writer.send({"id": id, "error": [e.code_word, e.wire_message()]})
        except Exception as e:
            log.exception("%s", op)
            failure = EngineFailure(f"{type(e).__name__}: {e}")
            writer.send({"id": id, "error": [failure.code_word, failure.wire_message()]})


class SocketPort:
    """A text model's end. It connects when it can and again when the engine model was loaded again."""

    def __init__(self, engine_model: str, deliver: Deliver) -> None:
        self._engine_model = engine_model
        self._where = address(engine_model)
        self._deliver = deliver
        self._lock = threading.Lock()
        self._running: set[str] = set()
        self._calls: dict[str, Future[Any]] = {}
        self._numbers = itertools.count()
        self._connection: socket.socket | None = None
        self._connected = threading.Event()
        self._lost_at = time.monotonic()
        self._gave_up_at = 0.0
        self._closing = threading.Event()
        self._facts: EngineFacts | None = None
        self._thread = threading.Thread(target=self._run, name="trtforge-link", daemon=True)
        self._thread.start()

    def submit(self, id: str, ask: Ask) -> None:
        try:
            with self._lock:
                self._running.add(id)
            self._send({"op": "submit", "id": id, "ask": pack_ask(ask)})
        except ForgeError as e:
            self._finish([failed(id, e)])
        except Exception as e:  # ours; an error that got out to Triton would end the request behind our back
            log.exception("submitting %s", id)
            self._finish([failed(id, EngineFailure(f"{type(e).__name__}: {e}"))])

    def cancel(self, id: str) -> None:
        self._tell("cancel", id)

    def stop(self, client_id: str) -> None:
        self._tell("stop", client_id)

    def encode(self, text: str, special_tokens: bool) -> list[int]:
        ids: list[int] = self._call("encode", text, special_tokens)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._call("decode", list(ids)))

    def facts(self) -> EngineFacts:
        self._await_engine()
        assert self._facts is not None
        return self._facts

    def close(self) -> None:
        self._closing.set()
        if self._connection is not None:
            shut(self._connection)
        self._thread.join(timeout=5)

    def _tell(self, op: str, id: str) -> None:
        try:
            self._send({"op": op, "id": id})
        except ForgeError as e:
            log.debug("%s %s: %s", op, id, e)  # its request has already failed with the connection

    def _call(self, op: str, *args: Any) -> Any:
        future: Future[Any] = Future()
        id = f"call{next(self._numbers)}"
        self._calls[id] = future
        try:
            self._send({"op": op, "id": id, "args": args})
            return future.result(CALL_SECONDS)
        except concurrent.futures.TimeoutError as e:  # not the built-in one before Python 3.11
            raise Unavailable(f"the engine model {self._engine_model!r} does not answer") from e
        finally:
            self._calls.pop(id, None)

    def _await_engine(self) -> None:
        """Requests come here one after the other, so that only one in a while may wait in vain."""
        now = time.monotonic()
        patience = self._lost_at + PATIENCE_SECONDS - now
        if now - self._gave_up_at > LEAST_PATIENCE_SECONDS:
            patience = max(patience, LEAST_PATIENCE_SECONDS)
        if not self._connected.wait(max(0.0, patience)):
            if patience > 0:
                self._gave_up_at = time.monotonic()
            raise Unavailable(f"the engine model {self._engine_model!r} is not loaded; load it and try again")

    def _send(self, message: dict[str, Any]) -> None:
        self._await_engine()
        try:
            with self._lock:
                if self._connection is None:
                    raise BrokenPipeError
                send_frame(self._connection, message)
        except OSError as e:
            raise Unavailable(f"the engine model {self._engine_model!r} was unloaded") from e

    def _run(self) -> None:
        while not self._closing.is_set():
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(self._where)
            except OSError:
                connection.close()
                self._closing.wait(RETRY_SECONDS)
                continue
            if same_user(connection):
                self._read(connection)
            connection.close()

    def _read(self, connection: socket.socket) -> None:
        self._connection = connection
        try:
            for message in read_frames(connection):
                if "outputs" in message:
                    self._finish([unpack_output(o) for o in message["outputs"]])
                elif "facts" in message:
                    self._facts = EngineFacts(**message["facts"])
                    self._connected.set()
                elif future := self._calls.get(message["id"]):
                    error = message.get("error")
                    future.set_exception(RemoteError(*error)) if error else future.set_result(
                        message["result"]
                    )
        except OSError as e:
            log.debug("link: %s", e)
        self._connected.clear()
        self._lost_at = time.monotonic()
        with self._lock:
            self._connection = None
            lost, self._running = self._running, set()
        gone = Unavailable(f"the engine model {self._engine_model!r} was unloaded or its process ended")
        self._deliver([failed(id, gone) for id in lost])
        for future in list(self._calls.values()):
            if not future.done():
                future.set_exception(gone)

    def _finish(self, outputs: Sequence[RequestOutput]) -> None:
        with self._lock:
            known = [
                o for o in outputs if o.id in self._running
            ]  # the others have failed with the connection
            self._running.difference_update([o.id for o in known if o.finished])
        self._deliver(known)


def shut(s: socket.socket) -> None:
    """Wake whoever reads or accepts, then close."""
    try:
        s.shutdown(socket.SHUT_RDWR)
    except OSError as e:
        log.debug("shutdown: %s", e)
    s.close()
