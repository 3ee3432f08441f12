"""Jobs and timers for test_measuring.py, which a worker process imports by name."""

import os
import sys
import time

from fastformer.tuning import Candidate


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
