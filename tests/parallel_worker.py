"""Processes of one group, over gloo, which compare what is sharded with what is whole.

    python parallel_worker.py WORLD FOLDER CHECK ...

One process imports torch and is then forked, because to import it takes longer than the checks. A
check is a function of parallel_checks.py, which raises where something is wrong. Each process
prints a line of JSON: the rank, the check and what is wrong, "" for nothing.
"""

import faulthandler
import json
import logging
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist

torch.set_num_threads(1)  # before the fork: no pool of threads is there to be lost

import parallel_checks
from fastformer.kernels import interpreter

logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
interpreter.repair()


def main(rank: int, world: int, folder: str, names: list[str]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/{'-'.join(names)}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    faulthandler.dump_traceback_later(400, exit=True)  # where it hangs
    for name in names:
        wrong, ended = "", False
        try:
            getattr(parallel_checks, name)(Path(folder))
        except SystemExit:
            ended = True
        except BaseException:  # a checkpoint's errors are no Exception
            wrong = traceback.format_exc()
        line = json.dumps({"rank": rank, "check": name, "wrong": wrong}) + "\n"
        os.write(1, line.encode())  # at once, so that the lines of two processes do not mix
        if wrong or ended:
            return
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    world = int(sys.argv[1])
    for rank in range(world):
        if os.fork() == 0:
            main(rank, world, sys.argv[2], sys.argv[3:])
            os._exit(0)  # torch's own threads are left, whose end is a race
    for _ in range(world):
        os.wait()
