"""Processes of one group, over gloo, which compare what is sharded with what is whole.

    python parallel_worker.py WORLD FOLDER CHECK ...

One process imports torch and is then forked, because to import it takes longer than the checks. A
check is a function of parallel_checks.py, which raises where something is wrong. Each process
prints a line of JSON: the rank, the check and what is wrong, "" for nothing. Where one fails, the
others are killed.
"""

import faulthandler
import json
import logging
import os
import signal
import sys
import traceback
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

import torch
import torch._dynamo  # as DTensor does at its first call: once, before the fork
import torch.distributed as dist

torch.set_num_threads(1)  # before the fork: no pool of threads is there to be lost

import parallel_checks
from fastformer.kernels import interpreter

logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
interpreter.repair()
FAILED = 4  # the status of a process that has found something wrong


def main(rank: int, world: int, file: str, names: list[str]) -> bool:
    """Run the checks as one process of a group, and return whether one has failed."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    dist.init_process_group(
        "gloo",
        init_method=f"file://{file}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    for name in names:
        faulthandler.dump_traceback_later(400, exit=True)  # where it hangs
        wrong, ended = "", False
        try:
            getattr(parallel_checks, name)(Path(file).parent)
        except SystemExit:
            ended = True
        except BaseException:  # a checkpoint's errors are no Exception
            wrong = traceback.format_exc()
        line = json.dumps({"rank": rank, "check": name, "wrong": wrong}) + "\n"
        os.write(1, line.encode())  # at once, so that the lines of two processes do not mix
        if wrong or ended:
            return bool(wrong)
    dist.barrier()
    dist.destroy_process_group()
    return False


def run(world: int, file: str, names: list[str]) -> None:
    """Run the checks in a group of processes."""
    processes = set()
    for rank in range(world):
        process = os.fork()
        if process == 0:
            failed = main(rank, world, file, names)
            os._exit(FAILED if failed else 0)  # torch's own threads are left, whose end is a race
        processes.add(process)
    while processes:
        process, status = os.wait()
        processes.remove(process)
        if os.waitstatus_to_exitcode(status) == FAILED:
            for other in processes:
                os.kill(other, signal.SIGKILL)


if __name__ == "__main__":
    world, folder, names = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    run(world, f"{folder}/{world}-{'-'.join(names)}", names)
