"""The compile gate: every shipped configuration, compiled for GPUs that need not be there.

    python -m benchmarks.proof.compile_gate            prints the table: compiles the cases whose
                                                       sources have changed and reads the others
                                                       from the data
    python -m benchmarks.proof.compile_gate --all      compiles all cases
    python -m benchmarks.proof.compile_gate --write    also writes benchmarks/results/compile.json

tests/proof/test_compile.py asserts on the same facts. Speed is not among them.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import itertools
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import ROOT

HERE = Path(__file__).resolve().parent
DATA = ROOT / "benchmarks" / "results" / "compile.json"
WORKERS = 2
SECONDS = 300  # a case that takes longer is killed

# --------------------------------------------------------------------------------------- the cases

Case = dict[str, Any]
CASES: dict[str, Case] = {}  # by name: "sm_90 attention bf16 D=64 causal, dropout"

MASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "lengths": {"lengths": True},
    "key mask": {"mask": "key"},
    "2-D mask": {"mask": "2d"},
    "2-D mask, causal, lengths": {"mask": "2d", "causal": True, "lengths": True},
    "key bias": {"bias": "key bf16"},
    "2-D bias": {"bias": "2d bf16"},
    "2-D fp32 bias": {"bias": "2d fp32"},
    "2-D mask, 2-D bias, causal, lengths": {
        "mask": "2d", "bias": "2d bf16", "causal": True, "lengths": True,
    },
    "key mask, key bias, causal": {"mask": "key", "bias": "key fp32", "causal": True},
    "window": {"window": [256, 0]},
    "window, bottom-right, lengths": {
        "window": [128, 128], "alignment": "bottom_right", "lengths": True,
    },
    "alibi, causal": {"alibi": True, "causal": True},
    "softcap, causal": {"softcap": 50.0, "causal": True},
    "sinks, window": {"sinks": True, "window": [127, 0]},
    "shard, bottom-right, lengths": {
        "shard": [6, 12, 4096, 8192, 16, 16384, 16384], "causal": True,
        "alignment": "bottom_right", "lengths": True,
    },
    "packed": {"packed": True},
    "packed, causal": {"packed": True, "causal": True},
    "2-D mask of numbers": {"bias": "mask bf16"},
    "unaligned 2-D mask, 2-D bias": {"mask": "2d", "bias": "2d bf16", "length": 4099},
}  # fmt: skip
NOTHING = dict(
    mask="", bias="", causal=False, lengths=False, window=None, alignment="top_left", alibi=False,
    softcap=None, sinks=False, packed=False, shard=None,
)  # fmt: skip


def _attention(
    arch: str, dtype: str, dims: tuple[int, ...], masks: list[str], dropout: list[bool]
) -> None:
    for d in dims:
        for mask in masks:
            for drop in dropout:
                name = f"{arch} attention {dtype} D={d} {mask}" + ", dropout" * drop
                shape = dict(arch=arch, op="attention", dtype=dtype, d=d, length=4096, dropout=drop)
                CASES[name] = {**shape, **NOTHING, **MASKS[mask]}


DECODED: dict[str, dict[str, Any]] = {
    "one query, lengths": {"lengths": True},
    "lengths, causal": {"queries": 4, "causal": True, "alignment": "bottom_right", "lengths": True},
    "16 queries": {"queries": 16},
    "key mask": {"mask": "key"},
    "2-D mask, causal": {"queries": 4, "mask": "2d", "causal": True},
    "2-D bias, sinks": {"queries": 4, "bias": "2d bf16", "sinks": True},
    "key bias": {"bias": "key fp32"},
    "window, alibi, softcap": {
        "queries": 4, "window": [1024, 0], "alibi": True, "softcap": 50.0,
        "alignment": "bottom_right",
    },
    "pages of 16": {"page": 16},
    "pages of 128, causal": {
        "page": 128, "queries": 4, "causal": True, "alignment": "bottom_right",
    },
}  # fmt: skip


def _decode(arch: str, dtype: str, dims: tuple[int, ...], names: Iterable[str]) -> None:
    for d in dims:
        for name in names:
            shape = dict(arch=arch, op="decode", dtype=dtype, d=d, length=4096, queries=1, page=0)
            CASES[f"{arch} decode {dtype} D={d} {name}"] = {**shape, **NOTHING, **DECODED[name]}


def _layer_norm(arch: str, dtype: str, widths: tuple[int, ...], unbiased: list[bool]) -> None:
    for n in widths:
        for u in unbiased:
            name = f"{arch} layer_norm {dtype} N={n}" + " unbiased" * u
            CASES[name] = dict(arch=arch, op="layer_norm", dtype=dtype, n=n, unbiased=u)


def _rows(op: str, arch: str, dtype: str, widths: tuple[int, ...], size: str = "n") -> None:
    for n in widths:
        name = f"{arch} {op} {dtype} {size.upper()}={n}"
        CASES[name] = {"arch": arch, "op": op, "dtype": dtype, size: n}


def _feed_forward(arch: str, dtype: str, activations: list[str], dropout: list[bool]) -> None:
    for activation in activations:
        for drop in dropout:
            name = f"{arch} feed_forward {dtype} {activation}" + ", dropout" * drop
            CASES[name] = dict(
                arch=arch,
                op="feed_forward",
                dtype=dtype,
                d=1024,
                activation=activation,
                dropout=drop,
            )


_EVERY = "2-D mask, 2-D bias, causal, lengths"
_attention("sm_90", "bf16", (64, 128, 256), list(MASKS)[:6], [False, True])
_attention("sm_90", "bf16", (64, 128, 256), list(MASKS)[6:10], [True])
_attention("sm_90", "bf16", (64, 128), list(MASKS)[10:], [True])
_attention("sm_90", "bf16", (64,), ["2-D mask of numbers"], [False])
_attention("sm_90", "bf16", (64, 128), ["sinks, window"], [False])
_attention("sm_80", "bf16", (64, 128), ["sinks, window"], [True])
_attention("sm_80", "bf16", (128,), list(MASKS)[-1:], [True])
_attention("sm_90", "bf16", (256,), ["window, bottom-right, lengths", "packed"], [True])
_attention("sm_90", "bf16", (16, 32, 80), [_EVERY], [True])
_attention("sm_90", "fp32", (32, 64, 128, 256), [_EVERY], [True])
_attention("sm_90", "fp32", (64, 128), ["causal"], [False])
_decode("sm_90", "bf16", (128,), DECODED)
_decode("sm_90", "bf16", (64, 256), ["lengths, causal", "key mask"])
_decode("sm_90", "fp32", (128,), ["pages of 16"])
for _arch in ("sm_80", "sm_90", "sm_100"):
    _decode(_arch, "fp16", (128,), ["lengths, causal"])
    _decode(_arch, "fp32", (64,), ["lengths, causal"])
_layer_norm("sm_90", "bf16", (512, 4096, 8192, 16384), [False])
_layer_norm("sm_90", "bf16", (512, 16384), [True])
_layer_norm("sm_90", "fp32", (512, 8192, 16384), [False])
_rows("rms_norm", "sm_90", "bf16", (512, 16384))
_rows("dropout_add_layer_norm", "sm_90", "bf16", (512, 1024, 4096, 8192, 16384))
_rows("dropout_add_layer_norm", "sm_90", "fp32", (512, 8192))
_rows("dropout_add_rms_norm", "sm_90", "bf16", (512, 8192, 16384))
_rows("embed", "sm_90", "bf16", (512, 4096))
_rows("cross_entropy", "sm_90", "bf16", (512, 32768, 50257), "v")
_rows("cross_entropy", "sm_90", "fp32", (32768,), "v")
for _v in (32768, 50257):
    _case = CASES[f"sm_90 cross_entropy bf16 V={_v}"]
    CASES[f"sm_90 cross_entropy bf16 V={_v} ahead"] = {**_case, "ahead": True}
_feed_forward("sm_90", "bf16", ["relu", "gelu", "gelu_tanh", "silu"], [False, True])
_feed_forward("sm_90", "fp32", ["relu", "gelu"], [True])
_rows("geglu", "sm_90", "bf16", (4096,))
_rows("geglu", "sm_90", "fp32", (4096,))
_rows("swiglu", "sm_90", "bf16", (4096,))
for _arch in ("sm_80", "sm_89", "sm_90", "sm_100", "gfx942", "other"):
    _decode(_arch, "bf16", (128, 256), ["lengths, causal"])
    _decode(_arch, "bf16", (128,), ["pages of 16"])
    _decode(_arch, "fp32", (128, 256), ["lengths, causal"])
for _arch in ("sm_80", "sm_89", "sm_100", "gfx942", "gfx90a", "other"):
    if _arch != "gfx90a":
        _attention(_arch, "bf16", (128,), ["causal"], [False])
        _attention(_arch, "bf16", (64, 128, 256), ["key mask"], [True])
    _attention(_arch, "bf16", (64, 128, 256), [_EVERY], [True])
    _attention(_arch, "fp32", (64, 128, 256), [_EVERY], [True])
    _layer_norm(_arch, "bf16", (8192, 16384), [False])
    _rows("dropout_add_layer_norm", _arch, "bf16", (512, 8192))
    _rows("embed", _arch, "bf16", (512,))
    _rows("geglu", _arch, "bf16", (4096,))
    _rows("cross_entropy", _arch, "bf16", (32768,), "v")
    _feed_forward(_arch, "bf16", ["relu", "gelu"], [True])
    _feed_forward(_arch, "fp32", ["gelu"], [True])
for _arch in ("sm_90", "gfx942"):
    CASES[f"{_arch} feed_forward bf16 gelu, dropout, torch's GEMM"] = {
        **CASES["sm_90 feed_forward bf16 gelu, dropout"],
        "arch": _arch,
        "choices": {"feed_forward first": "torch"},
    }
for _name in ("dropout_add_layer_norm bf16 N=1024", "feed_forward bf16 gelu, dropout"):
    CASES[f"sm_90 {_name}, shard"] = {
        **CASES[f"sm_90 {_name}"],
        "shard": [512, 1024, 8192, 128, 4096],
    }
for _d in (64, 128):
    for _keys in (64, 128):
        for _mask in ("plain", "causal"):
            _row = f"warp-specialised 128 {_keys}"
            CASES[f"sm_90 attention bf16 D={_d} {_mask}, {_row}"] = {
                **CASES[f"sm_90 attention bf16 D={_d} {_mask}"],
                "choices": {"attention forward": _row},
            }

for _drop in ("", ", dropout"):
    CASES[f"sm_90 attention bf16 D=64 2-D mask, all tiles{_drop}"] = {
        **CASES[f"sm_90 attention bf16 D=64 2-D mask{_drop}"],
        "choices": {f"attention {way} bounds": "all tiles" for way in ("forward", "backward")},
    }

# Spills that are known and stay: part of a case's name, of a kernel's, bytes.
#   float32 at D=256: the tf32 parts of a [16, 256] operand fill a warp; no tile is smaller.
#   rows of 8192 in 16 warps: 128 registers a thread, dropout's words among them.
#   bf16 at D=256: a few registers, stored before the loop and loaded after it, against half the
#   queries in a tile. The same at D=128 on sm_80, beside a mask of keys.
KNOWN_SPILLS: tuple[tuple[str, str, int], ...] = (
    ("sm_100 attention fp32 D=256", "backward_dkdv", 950),
    ("attention fp32 D=256", "", 900),
    ("decode fp32 D=256", "split", 160),
    ("sm_90 attention bf16 D=256", "backward_dkdv", 48),
    ("sm_80 attention bf16 D=128 key mask", "backward_dkdv", 36),
    ("sm_100 attention bf16 D=128 key mask", "backward_dkdv", 8),  # Triton 3.9
    ("attention fp32 D=64", "backward_dkdv", 32),
    ("sm_90 attention fp32 D=128 2-D mask, 2-D bias", "backward_dbias", 44),
    ("other attention bf16 D=256 2-D mask, 2-D bias", "backward_dkdv", 12),
    ("other attention bf16 D=64 key mask, dropout", "backward_dq", 8),
    ("gfx942 attention bf16 D=256", "backward_dq", 20),
    ("dropout_add_layer_norm bf16 N=8192", "backward", 8),
    ("dropout_add_layer_norm fp32 N=8192", "backward", 24),
)
# Serialised wgmma that are known and stay: part of a case's name, of a kernel's. At D=256 there are
# no registers for the loop that would let dQ read masked keys (`Tile.again`).
KNOWN_SERIALISED: tuple[tuple[str, str], ...] = (
    ("sm_90 attention bf16 D=256 key", "backward_dq"),
    ("sm_90 attention bf16 D=256 2-D mask", "backward_dkdv"),
)
# Triton 3.6 allocates registers worse: more of both. Where a kernel without dropout spills, it is
# outside the loops.
if metadata.version("triton").startswith("3.6."):
    KNOWN_SPILLS += (
        ("sm_90 attention bf16 D=64 key mask", "backward_dkdv", 48),
        ("sm_90 attention bf16 D=64 2-D mask, 2-D bias", "backward_dkdv", 60),
        ("sm_90 attention bf16 D=64 2-D mask, dropout", "backward_dkdv", 16),
        ("sm_90 attention bf16 D=128 plain", "backward_dkdv", 48),
        ("sm_90 attention bf16 D=128 key mask", "backward_dkdv", 24),
        ("sm_90 attention bf16 D=128 sinks, window", "backward_dkdv", 8),
        ("attention bf16 D=256 2-D mask, 2-D bias", "backward_dkdv", 92),
        ("sm_80 attention bf16 D=128 2-D mask, 2-D bias", "backward_dkdv", 56),
        ("sm_100 attention bf16 D=64 key mask", "backward_dkdv", 16),
        ("attention fp32 D=128", "", 60),
        ("attention fp32 D=256", "", 908),
        ("feed_forward bf16 silu", "hidden_backward", 8),
        ("other decode bf16 D=256", "split", 24),
    )
    KNOWN_SERIALISED += (
        ("key mask, key bias", "forward"),
        ("key mask, key bias", "backward_dq"),
        ("2-D mask, 2-D bias", "backward_dkdv"),
        ("sm_90 attention bf16 D=256 2-D bias", "backward_dkdv"),
    )
# Triton 3.9 needs more of them beside dropout, and for dK and dV at D=256.
if metadata.version("triton").startswith("3.9."):
    KNOWN_SPILLS += (
        ("sm_90 attention bf16 D=64 2-D bias, dropout", "backward_dkdv", 8),
        ("sm_90 attention bf16 D=64 2-D fp32 bias, dropout", "backward_dkdv", 16),
        ("sm_90 attention bf16 D=64 2-D mask, 2-D bias", "backward_dkdv", 32),
        ("sm_90 attention bf16 D=64 alibi, causal, dropout", "backward_dkdv", 8),
        ("sm_90 attention bf16 D=128 key bias, dropout", "backward_dkdv", 32),
        ("sm_90 attention bf16 D=128 2-D bias, dropout", "backward_dkdv", 144),
        ("sm_90 attention bf16 D=128 2-D fp32 bias, dropout", "backward_dkdv", 24),
        ("sm_90 attention bf16 D=128 key mask, key bias", "backward_dkdv", 72),
        ("sm_90 attention bf16 D=128 alibi, causal, dropout", "backward_dkdv", 32),
        ("sm_90 attention bf16 D=128 softcap, causal, dropout", "backward_dkdv", 68),
        ("sm_90 attention bf16 D=256", "backward_dkdv", 700),
        ("sm_90 attention bf16 D=256 2-D fp32 bias, dropout", "backward_dq", 56),
        ("sm_90 attention bf16 D=256 2-D mask, 2-D bias", "backward_dq", 88),
        ("sm_90 attention bf16 D=256 2-D mask, 2-D bias", "backward_dbias", 32),
        ("attention bf16 D=64 key mask, dropout", "backward_dq", 40),
        ("attention fp32 D=128 2-D mask, 2-D bias", "", 176),
        ("other attention fp32 D=64 2-D mask, 2-D bias", "backward_dkdv", 44),
        ("sm_90 layer_norm fp32 N=16384", "backward_wide_dx", 8),
        ("dropout_add_layer_norm fp32 N=8192", "backward", 56),
        ("dropout_add_layer_norm bf16 N=8192", "backward", 16),
    )
    KNOWN_SERIALISED += (("sm_90 attention bf16 D=256 2-D bias", "backward_dkdv"),)


def problems(name: str, answer: dict[str, Any]) -> list[str]:
    """What is wrong with a compiled case, in words."""
    if "error" in answer:
        return [answer["error"]]
    case, found = CASES[name], []
    cuda, single = not case["arch"].startswith("gfx"), case["dtype"] == "fp32"
    for record in answer["records"]:
        kernel = record["kernel"]

        def say(text: str, kernel: str = kernel) -> None:
            found.append(f"{kernel}: {text}")

        # Rows of a mask or a bias that are not 16-aligned: what it costs stands in the table alone.
        unaligned = case["op"] == "attention" and case["length"] % 16 > 0
        known = [n for part, of_kernel, n in KNOWN_SPILLS if part in name and of_kernel in kernel]
        if record["spill"] > max(known, default=0) and not unaligned:
            say(f"{record['spill']} bytes of spill")
        known = [k for part, k in KNOWN_SERIALISED if part in name and k in kernel]
        if record["serialised"] and not (known or unaligned):
            say(f"wgmma is serialised, {' '.join(record['serialised'])}")
        if record["shared"] > answer["limit"]:
            say(f"{record['shared']} bytes of shared memory, the limit is {answer['limit']}")
        if record["tensor_memory"] > 512:
            say(f"{record['tensor_memory']} columns of tensor memory, there are 512")
        if record["f64"]:
            say("float64 arithmetic")
        if case.get("activation") == "relu" and kernel.startswith("hidden") and record["drops_nan"]:
            say("NaN is dropped, by a maximum or a comparison")
        # A small tile of a mask, or bytes one by one: not 16 bytes for each thread.
        small = record["blocks"].get("rows", 1) * record["blocks"].get("columns", 1) < 1024
        few = kernel == "bounds" and (small or unaligned)
        if not record["vectors"] and not few:
            say("no load of 16 bytes")
        of_sequence = case.get("packed") and kernel != "delta"  # which may be shorter than others
        of_attention = case["op"] in ("attention", "decode")
        if of_attention and record["ends_early"] != bool(of_sequence):
            say("a branch to the end" if record["ends_early"] else "no end before the work")
        asked_for = record["kernel"] == "backward_dbias"
        large = case["op"] == "attention" and record["largest"] >= case["length"] ** 2
        if large and not asked_for:
            say(f"an argument has {record['largest']} elements, Sq * Sk: neither mask nor bias")
        if not record["dots"]:
            continue
        few = case["op"] == "decode" and record["blocks"]["rows"] < 64  # the rows of a wgmma
        if case["arch"] == "sm_90" and not single and record["matrix"] != "wgmma" and not few:
            say(f"the matrix instruction is {record['matrix']}")
        if record["matrix"] == "-":
            say("no matrix instruction")
        if cuda and record["stages"] > 1 and record["asynchronous"] == "-":
            say("no asynchronous copies, with more than one stage")
        if single and record["precision"] != ("tf32x3" if cuda else "ieee"):
            say(f"float32 products by {record['precision']}")
        if single and cuda and record["parts"] < 3:
            say(f"{record['parts']} tf32 products for a float32 one")
    return found


# ------------------------------------------------------------------------------------ the workers


class Worker:
    """A process that compiles; started again when a compile takes it down."""

    process: subprocess.Popen[str] | None = None
    errors: Any = None

    def ask(self, case: Case) -> dict[str, Any]:
        if self.process is None:
            self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it outlives this call
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "compile_worker.py")],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
            )  # fmt: skip
        timer = threading.Timer(SECONDS, self.process.kill)
        timer.start()
        try:
            self.process.stdin.write(json.dumps(case) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        timer.cancel()
        if line:
            return json.loads(line)
        self.process.kill()
        status, self.process = self.process.wait(), None
        self.errors.seek(0)
        return dict(error=f"the process died, status {status}: {self.errors.read()[-1000:]}")

    def close(self) -> None:
        if self.process is not None:
            self.process.communicate()


def compile_all(cases: dict[str, Case], progress: Any = None) -> dict[str, dict[str, Any]]:
    """The worker's answer to each case: {"records", "limit", "seconds"} or {"error"}."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in cases:
        waiting.put(name)
    answers: dict[str, dict[str, Any]] = {}

    def work() -> None:
        worker = Worker()
        while True:
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                break
            answers[name] = worker.ask(cases[name])
            if progress:
                progress(name, answers[name])
        worker.close()

    threads = [threading.Thread(target=work) for _ in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {name: answers[name] for name in cases}


# ----------------------------------------------------------------------------------- the sources

# The ops of each kernel file or folder.
FAMILIES = {
    "attention": ("attention", "decode"),
    "layer_norm": ("layer_norm", "rms_norm", "dropout_add_layer_norm", "dropout_add_rms_norm"),
    "feed_forward": ("feed_forward", "geglu", "swiglu"),
    "embedding": ("embed",),
    "cross_entropy": ("cross_entropy",),
}
UNCOMPILED = ("interpreter.py", "registration.py")  # of which no kernel and no tile is made


def digest(case: Case, model: str = "") -> str:
    """Return a digest of a case, of the code that its kernels are compiled from and read by, and of
    the code of a model that is made of them.
    """
    (own,) = (family for family, ops in FAMILIES.items() if case["op"] in ops)
    files = [ROOT / "fastformer" / "description.py", HERE / "sass.py"]
    files.append(HERE / "compile_worker.py")
    for path in sorted((ROOT / "kernels").rglob("*.py")):
        family = path.relative_to(ROOT / "kernels").parts[0].removesuffix(".py")
        if family == own or (family not in FAMILIES and path.name not in UNCOMPILED):
            files.append(path)
    text = json.dumps(case, sort_keys=True) + "".join(map(_code, files)) + model
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@functools.cache
def _code(path: Path) -> str:
    """Return the source without what changes no kernel: comments, docstrings, where the file lies
    and where the names come from.
    """
    tree = ast.parse(path.read_text())
    tree.body = [
        node
        for node in tree.body
        if not isinstance(node, (ast.Import, ast.ImportFrom))
        and "__file__" not in ast.unparse(node)
    ]
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [x for x in body if not _is_string(x)] or [ast.Pass()]
    return ast.unparse(tree)


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


@dataclass
class Table:
    """What is known of the compiled cases. A line of the file holds a case."""

    triton: str
    cases: dict[str, dict[str, Any]]  # by name: "digest" of the sources, "rows"

    @classmethod
    def read(cls, path: Path) -> Table:
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        lines = (f"{json.dumps(name)}: {json.dumps(case)}" for name, case in self.cases.items())
        start = f'{{"triton": {json.dumps(self.triton)}, "cases": {{\n'
        path.write_text(start + ",\n".join(lines) + "\n}}\n")

    def stale(self, digests: dict[str, str]) -> list[str]:
        """Return the names of the cases that are not known of these sources and this Triton."""
        if self.triton != metadata.version("triton"):
            return list(digests)
        return [n for n, of in digests.items() if self.cases.get(n, {}).get("digest") != of]

    def updated(self, digests: dict[str, str], rows: dict[str, list[Any]]) -> Table:
        """Return the table with these rows in place of the former ones of their cases."""
        cases = {
            name: {"digest": of, "rows": rows[name]} if name in rows else self.cases[name]
            for name, of in digests.items()
            if name in rows or name in self.cases
        }
        return Table(metadata.version("triton"), cases)


# -------------------------------------------------------------------------------------- the table


class Kernel(NamedTuple):
    """A row of the table."""

    name: str
    blocks: str  # their sizes, warps and stages
    registers: int
    spill: int  # bytes a thread, stores and loads together
    serialised: str  # the wgmma that ptxas warns to run one by one
    shared: int  # bytes a block
    instructions: str


HEADER = """\
# What the compilers make of the kernels

Triton {version}. Spill: bytes a thread, stores and loads together. Shared: bytes a block.
Serialised: ptxas warns that it runs the wgmma one by one. A kernel stands under the first case that
launches it.

| case | kernel | blocks, warps, stages | registers | spill | serialised | shared | instructions |
|---|---|---|---|---|---|---|---|
"""


def rows(answers: dict[str, dict[str, Any]]) -> dict[str, list[Kernel]]:
    """Return the kernels of each case, each kernel of an architecture under its first case."""
    seen: set[tuple[str, str]] = set()
    found: dict[str, list[Kernel]] = {}
    for name, answer in answers.items():
        found[name] = []
        for r in answer.get("records", []):
            if (r["hash"], CASES[name]["arch"]) in seen:
                continue
            seen.add((r["hash"], CASES[name]["arch"]))
            blocks = "x".join(map(str, r["blocks"].values())) + f" w{r['warps']}"
            blocks += f" s{r['stages']}" if r["stages"] else ""
            serialised = " ".join(r["serialised"]) or "-"
            instructions = [r[kind] for kind in ("matrix", "asynchronous") if r[kind] != "-"]
            words = ", ".join(instructions) or "-"
            row = (r["kernel"], blocks, r["registers"], r["spill"], serialised, r["shared"], words)
            found[name].append(Kernel(*row))
    return found


def known() -> dict[str, list[Kernel]]:
    """Return the committed rows of each case."""
    cases = Table.read(DATA).cases
    return {name: [Kernel(*row) for row in case["rows"]] for name, case in cases.items()}


def digests() -> dict[str, str]:
    """Return the digest of each case, of the sources as they are."""
    return {name: digest(case) for name, case in CASES.items()}


def differences(name: str, new: Iterable[Kernel], table: dict[str, list[Kernel]]) -> list[str]:
    """Return how the spills and serialisations of a case differ from those of the table, in words.
    A kernel that the table holds under another case of the architecture counts as known.
    """

    def facts(rows: Iterable[Kernel]) -> list[str]:
        return [f"{k.name} {k.blocks}: spill {k.spill}, serialised {k.serialised}" for k in rows]

    arch = CASES[name]["arch"]
    others = (facts(rows) for n, rows in table.items() if n in CASES and CASES[n]["arch"] == arch)
    now, known = facts(new), set(itertools.chain.from_iterable(others))
    return [
        *(f"{fact}: not in {DATA.name}" for fact in now if fact not in known),
        *(f"{fact}: only in {DATA.name}" for fact in facts(table[name]) if fact not in now),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--all", action="store_true", help="compile the cases that are known too")
    parser.add_argument("--write", action="store_true", help=f"write {DATA.relative_to(ROOT)}")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="the cases whose name contains TEXT"
    )
    options = parser.parse_args()
    table, now = Table.read(DATA), digests()
    asked = now if options.all else table.stale(now)
    cases = {name: CASES[name] for name in asked if options.only in name}
    started = time.time()

    def progress(name: str, answer: dict[str, Any]) -> None:
        seconds = f"{time.time() - started:5.0f} s  {answer.get('seconds', 0):5.1f} s of processor"
        print(seconds, name, file=sys.stderr)

    answers = compile_all(cases, progress)
    good = {name: answer for name, answer in answers.items() if "error" not in answer}
    table = table.updated(now, rows(good))
    print(HEADER.format(version=table.triton), end="")
    for name, case in table.cases.items():
        for row in case["rows"] if options.only in name else ():
            print("| " + " | ".join(map(str, (name, *row))) + " |")
    wrong = [f"{name}: {problem}" for name in cases for problem in problems(name, answers[name])]
    print(*wrong, sep="\n")
    seconds = sum(answer.get("seconds", 0) for answer in answers.values())
    print(
        f"{len(cases)} of {len(CASES)} cases compiled, {len(wrong)} problems, "
        f"{seconds:.0f} s of processor"
    )
    if options.write:
        table.write(DATA)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
