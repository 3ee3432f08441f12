"""What the tests of this folder share: jobs and timers, which a worker process imports by name, and
an op of torch.
"""

import os
import sys
import time

import torch

import fastformer as ff
from fastformer.tuning import Candidate

HERE = dict(gpu="GPU A", driver="570.1", torch="2.13.0", triton="3.7.1", fastformer="0.1.0")
CPU = torch.device("cpu")
FORWARD, OP = "attention forward", "scaled_dot_product_attention"


def flash(query, key, value, *rest, scale=1.0):
    """torch's own op on a CPU in the place of those of a GPU."""
    attention = ff.description.unpack(rest[:-1])
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, lse = op(query, key, value, 0.0, attention.is_causal, scale=attention.scale)
    return output * scale, lse.contiguous(), query.new_empty(0)


def by_itself(call):
    """A timer: the call says how long it takes."""
    return call()


def seconds(n):
    return lambda: n * 1e-6


def fail(message):
    raise RuntimeError(message)


def crash():
    sys.stderr.write("the kernel is gone\n")
    sys.stderr.flush()
    os.abort()


CANDIDATES = {
    "good": Candidate("good", seconds(50)),
    "better": Candidate("better", seconds(40)),
    "tie": Candidate("tie", seconds(49.5)),
    "slow": Candidate("slow", seconds(80)),
    "baseline": Candidate("baseline", seconds(1), baseline=True),
    "lies": Candidate("lies", seconds(1), lambda: "it disagrees with the reference"),
    "fails": Candidate("fails", seconds(1), lambda: fail("out of resources\nand more")),
    "fails late": Candidate("fails late", lambda: fail("later")),
    "crashes": Candidate("crashes", seconds(1), crash),
    "crashes @01234567": Candidate("crashes @01234567", seconds(1), crash),
    "hangs": Candidate("hangs", seconds(1), lambda: time.sleep(600)),
}


def jobs(work, key, names):
    """The candidates of those names."""
    if names == "no inputs":
        fail("out of memory")
    if names == "dies":
        print("the GPU is lost to its process", file=sys.stderr, flush=True)
        os._exit(1)
    yield key, [CANDIDATES[name] for name in names.split(", ")]
    assert work.done[key].us.keys() <= set(names.split(", "))


def by_tiles(call):
    """A timer: programs of more queries are faster."""
    from fastformer.kernels import launch

    taken = []
    former = launch.Launch.__init__

    def remember(self, kernel, grid, arguments, *rest):
        taken.append(arguments["tile"].rows.value)
        former(self, kernel, grid, arguments, *rest)

    launch.plans.clear()
    launch.Launch.__init__ = remember
    try:
        call()
    finally:
        launch.Launch.__init__ = former
    return 1.0 / taken[0] if taken else 1.0
