"""Run a command that the kernel kills as soon as the thread that started us ends, however that happens.

    python3 -I -S die_with_parent.py PARENT_PID PROGRAM [ARGUMENT ...]

Standard library only. A script rather than `preexec_fn`, which is unsafe in a process with threads.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    # SIGKILL: Triton does not end on SIGTERM while a model is stuck in loading.
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != int(sys.argv[1]):  # it ended before we could ask
        sys.exit("the parent is gone")
    os.execv(sys.argv[2], sys.argv[2:])
