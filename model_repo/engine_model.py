"""The model `tensorrt_llm`: token ids in and out, and the one process that holds the engine."""

import logging
import threading
from dataclasses import replace
from pathlib import Path

from trtforge.model_repo.link import Server, address
from trtforge.model_repo.metrics import Reporter
from trtforge.model_repo.model import Front
from trtforge.model_repo.parameters import ModelOptions
from trtforge.model_repo.port import Deliver, LocalPort
from trtforge.model_repo.tensors import Kind
from trtforge.runtime import manifest
from trtforge.runtime.engine import Engine

log = logging.getLogger(__name__)

METRICS_SECONDS = 0.1


class EngineModel(Front):
    kind = Kind.TOKENS

    def open_port(self, args: dict[str, str], options: ModelOptions) -> LocalPort:
        version = Path(args["model_repository"]) / args["model_version"]
        engine_dir = version / options.engine_path
        kv = manifest.load(engine_dir).kv
        self.engine = Engine.open(engine_dir, options.engine_config(kv.bytes_per_token)).start()
        self._reporter = Reporter(self.pb, self.name, args["model_version"])
        self._clients: dict[str, str] = {}
        self._server = Server(address(self.name), self._new_port)
        self._report_stop = threading.Event()
        self._report_thread = threading.Thread(target=self._report, name="trtforge-metrics", daemon=True)
        self._report_thread.start()
        log.info(
            "engine %s is open: %s KV blocks", self.engine.manifest.model["name"], self.engine.num_blocks
        )
        return self._new_port(self.deliver, "direct")

    def finalize(self) -> None:
        """Requests still in flight end. The last report is of nothing in use, and of the health that there was: an
        engine that is unloaded has not failed."""
        self._report_stop.set()
        self._report_thread.join(timeout=10)
        healthy = self.engine.healthy
        self._server.close()
        self.engine.shutdown()
        super().finalize()
        self._reporter.update(replace(self.engine.metrics(), healthy=healthy))
        self._reporter.abandon()
        log.info("engine %s is closed", self.engine.manifest.model["name"])

    def _new_port(self, deliver: Deliver, name: str) -> LocalPort:
        return LocalPort(self.engine, deliver, name, self._reporter.ended, self._clients)

    def _report(self) -> None:
        last = True
        while not self._report_stop.wait(METRICS_SECONDS):
            metrics = self.engine.metrics()
            self._reporter.update(metrics)
            if last and not metrics.healthy:
                log.error(
                    "the engine's thread has ended: every request fails until the model is loaded again"
                )
            last = metrics.healthy
