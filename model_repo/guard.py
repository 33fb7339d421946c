"""Owns a Triton server on behalf of the process that starts this, and leaves nothing of it behind.

    python3 -I guard.py NAME RUN_DIRECTORY GRACE_SECONDS PROGRAM [ARGUMENT ...]

Ends with the server. When the owner is gone, however that happened, it kills the server and every process that the
server made: after a kill of Triton alone its Python stubs can wait for ever on a lock in shared memory. SIGTERM lets
requests in flight end first, for at most so long; SIGINT does not. Then the shared memory regions whose names begin
with NAME and the run directory are removed. Standard library only.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
POLL_SECONDS = 0.05


def own_group_and_die_with_guard() -> None:
    """Runs in the server's process before it becomes Triton. The guard has no threads, so this is safe."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(name: str, run_directory: str, grace: str, *command: str) -> int:
    owner = os.getppid()
    deadline = float("inf")
    asked = []  # signals that came

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, frame: asked.append(received))
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=own_group_and_die_with_guard)
    try:
        while server.poll() is None and os.getppid() == owner and time.monotonic() < deadline:
            if asked and deadline == float("inf"):
                server.terminate()
                deadline = time.monotonic() + float(grace)
            if signal.SIGINT in asked:
                break
            time.sleep(POLL_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        status = server.wait()
        for region in Path("/dev/shm").glob(f"{name}*"):
            region.unlink(missing_ok=True)
        shutil.rmtree(run_directory, ignore_errors=True)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
