"""Bugs to plant in the kernels, one at a time: what the tests have to see.

They stand in tests/bugs/, a line each. In a line, `old` stands once in the text of the function
and `new` takes its place; tabs part the columns, and \\n stands for a new line. The function of a
kernel may also stand in kernels/common.py, launch.py or products.py.
"""

from pathlib import Path


def read(name):
    """The lines of a table, each as a list of its columns."""
    text = (Path(__file__).parent / "bugs" / f"{name}.tsv").read_text()
    lines = [line.split("\t") for line in text.splitlines() if not line.startswith("#")]
    return [[column.replace("\\n", "\n") for column in line] for line in lines]


def _by_kernel(*kinds):
    """By kernel: name: (function, old, new)."""
    bugs = {}
    for kernel, kind, name, *change in read("kernels"):
        if kind in kinds:
            bugs.setdefault(kernel, {})[name] = tuple(change)
    return bugs


# PLANTED are seen by a quick check beside the kernel's tests, which compiles the function again in
# the same process. MORE stand in the launchers, or need tests of their own:
# `python -m benchmarks.proof.mutation` plants all of both in a copy of the checkout.
PLANTED = _by_kernel("quick")
MORE = _by_kernel("more", "shard", "shard rows")
# Of the backward of short sequences: its own test plants all of them.
SHORT = _by_kernel("short")["attention/short_backward"]
# Of forms of the loss and of gates: the tests of their kernels plant all of them.
OWN = _by_kernel("own")
# Of block masks: tests/ops/test_mask_kernels.py plants all of them.
LISTS = _by_kernel("lists")["attention/lists"]
SHARDED = _by_kernel("shard")["attention"]
SHARDED_ROWS = _by_kernel("shard rows")["common"]

# Rules of sharding: (check, old, new), a check of tests/distributed/parallel_checks.py that has to
# fail when the rule is broken. `old` stands once in the files of SHARDING_SOURCES.
SHARDING = [tuple(rest) for rest in read("sharding")]
SHARDING_SOURCES = [
    path
    for pattern in ("dispatch/sharding/[a-z]*.py", "description.py", "distributed/styles.py",
                    "ops/*/contract.py", "ops/attention/record.py")
    for path in sorted((Path(__file__).parents[1] / "fastformer").glob(pattern))
]  # fmt: skip

# Bugs that change no result, and why.
EQUIVALENT = {
    ("attention", "an unbounded window"): "a side that is unbounded is no argument of the kernels",
    ("common", "threshold signed"): "Triton compares uint32 with int32 as unsigned",
}

# For the Gluon simulator, by name: (function, old, new, the call of test_hopper.py that shows it),
# and for the backward (kernel, function, old, new, the call of test_hopper_backward.py); for the
# backward of short sequences as for the forward, of test_hopper_short.py.
HOPPER_FORWARD = {name: tuple(rest) for name, *rest in read("hopper_forward")}
HOPPER_BACKWARD = {name: tuple(rest) for name, *rest in read("hopper_backward")}
HOPPER_SHORT = {name: tuple(rest) for name, *rest in read("hopper_short")}

# Faults that change nothing, and why.
HARMLESS = {
    "keys released too early": """\
The slot's next keys are copied only after the copies have waited for the release of the values of
the tile before the one that is computed (they copy the values of a tile before the keys of the
next), and a consumer releases these values after it has waited for all of its products.""",
    "the slot of the next values": """\
The copies fill the slots in order. With two slots it is the same slot. With n > 2 slots, what is
released behind tile t is the slot of tile t + 1. So the copies of the values of tiles k n and
k n + 1 wait for tiles k n - 1 and k n, which is longer than they need to. The slots of the n - 2
tiles that follow are released too early, but are filled after these, when the products of all tiles
before k n are done.""",
}
