"""Runs pytest for mutation.py, once for each line {"tests": [...], "limit": seconds of
CPU} on its standard input, and answers with a line {"status": ..., "output": ...}.

It starts in a copy of the checkout, imports the large packages, and forks a process for each run.
That process imports fastformer, and so reads the copy as it is then.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

OPTIONS = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider"]
WAITED = 10  # seconds of the clock per second of CPU, on a busy machine


def preload() -> None:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the root conftest.py has it
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    torch.set_num_threads(1)
    for name in ("pytest", "triton.language", "torch._dynamo"):
        with contextlib.suppress(ImportError):
            __import__(name)


def child(tests: list[str], limit: float, output: int) -> None:
    import pytest

    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 5))
    with contextlib.suppress(OSError):  # if memory runs out, this process is killed
        Path("/proc/self/oom_score_adj").write_text("1000")
    status = 2
    try:
        status = int(pytest.main([*OPTIONS, *tests, "-k", "not planted or None"]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run(tests: list[str], limit: float) -> dict[str, Any]:
    """Return the output and the exit status: negative for a signal, None past the limit."""
    with tempfile.TemporaryFile() as output:
        process = os.fork()
        if process == 0:
            child(tests, limit, output.fileno())
        end = time.monotonic() + WAITED * limit
        ended = 0
        while not ended and time.monotonic() < end:
            time.sleep(0.02)
            ended, code = os.waitpid(process, os.WNOHANG)
        if not ended:
            os.killpg(process, signal.SIGKILL)
            _, code = os.waitpid(process, 0)
        status = os.waitstatus_to_exitcode(code)
        late = not ended or status in (-signal.SIGXCPU, -signal.SIGKILL)
        output.seek(0)
        text = output.read().decode(errors="replace")
    return {"status": None if late else status, "output": text[-20000:]}


if __name__ == "__main__":
    preload()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps other output out of the answers
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), file=answers, flush=True)
