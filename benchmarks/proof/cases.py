"""The calls that the compile gate and the cost ledger compile, the processes that do it, and the
data of what they found, benchmarks/results/compile.json.
"""

from __future__ import annotations

import hashlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import ROOT

HERE = Path(__file__).resolve().parent
DATA = ROOT / "benchmarks" / "results" / "compile.json"
WORKERS = 2
SECONDS = 900  # a case that takes longer is killed

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
    "packed, key bias": {"packed": True, "bias": "key fp32"},
    "packed, alibi, softcap, causal": {
        "packed": True, "alibi": True, "softcap": 50.0, "causal": True,
    },
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


def _rotary(arch: str, dtype: str, dims: tuple[int, ...], forms: Iterable[str]) -> None:
    for d in dims:
        for form in forms:
            name = f"{arch} rotary_embedding {dtype} D={d}" + f" {form}" * bool(form)
            words = form.split(", ")
            CASES[name] = dict(
                arch=arch,
                op="rotary_embedding",
                dtype=dtype,
                d=d,
                rotary=d // 4 if "quarter" in words else d // 2 if "partial" in words else d,
                norm="norm" in words,
                interleaved="interleaved" in words,
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
_attention("sm_90", "bf16", (512,), ["plain", "causal"], [False])
_attention("sm_90", "bf16", (512,), ["key mask", "window", "packed, causal", _EVERY], [True])
_attention("sm_80", "bf16", (512,), ["causal", _EVERY], [True])
_attention("sm_90", "fp32", (32, 64, 128, 256), [_EVERY], [True])
_attention("sm_90", "fp32", (64, 128), ["causal"], [False])
_decode("sm_90", "bf16", (128,), DECODED)
_decode("sm_90", "bf16", (64, 256, 512), ["lengths, causal", "key mask"])
_decode("sm_80", "bf16", (512,), ["lengths, causal"])
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
_rotary("sm_90", "bf16", (64, 128, 256), ["", "norm"])
_rotary("sm_90", "bf16", (128,), ["interleaved", "interleaved, norm", "partial, norm"])
_rotary("sm_90", "bf16", (64,), ["quarter, norm"])
_rotary("sm_90", "fp32", (128,), ["norm"])
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
_rows("gated_activation", "sm_90", "bf16", (4096,))
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
    _rotary(_arch, "bf16", (128,), ["norm"])
    _rows("geglu", _arch, "bf16", (4096,))
    _rows("cross_entropy", _arch, "bf16", (32768,), "v")
    _feed_forward(_arch, "bf16", ["relu", "gelu"], [True])
    _feed_forward(_arch, "fp32", ["gelu"], [True])
_attention("sm_103", "bf16", (64, 128, 256), [_EVERY], [True])  # it takes the rows of sm_100
_attention("sm_103", "fp32", (128,), [_EVERY], [True])
_feed_forward("sm_103", "bf16", ["gelu"], [True])
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


def _hopper(dims: tuple[int, ...], masks: list[str], row: str = "Gluon 128 128") -> None:
    """Add cases with the forward for Hopper; a name leaves out its first row."""
    for d in dims:
        for mask in masks:
            kind, drop = mask.removesuffix(", dropout"), mask.endswith(", dropout")
            shape = dict(arch="sm_90", op="attention", dtype="bf16", d=d, length=4096, dropout=drop)
            named = "Gluon" if row == "Gluon 128 128" else row
            CASES[f"sm_90 attention bf16 D={d} {mask}, {named}"] = {
                **shape, **NOTHING, **MASKS[kind], "choices": {"attention forward": row},
            }  # fmt: skip


_hopper((64, 128), ["plain", "plain, dropout", "causal", "causal, dropout", "key mask"])
_hopper((64, 128), ["key mask, dropout", "window, bottom-right, lengths", "softcap, causal"])
_hopper((64, 128), ["key bias", "packed, causal"])
_hopper((64,), ["2-D bias", "alibi, causal", "2-D mask, dropout"])
_hopper((128,), ["2-D bias, dropout", "2-D mask"])
_hopper((128,), [f"{list(MASKS)[9]}, dropout"], "Gluon 128 64")
_hopper((256,), ["plain", "causal, dropout", "key mask"], "Gluon 128 64")
_hopper((128,), ["plain"], "Gluon 128 128, no turns")
_hopper((128,), ["causal", "2-D mask, causal, lengths"], "Gluon 128 128, packed")
_hopper((64,), ["causal"], "Gluon 192 128, packed")
_hopper((64, 128), ["plain", "causal"], "Gluon 128 128, persistent")

_BACKWARD = {"attention dkdv": "Gluon 64 128", "attention dq": "Gluon 128 128"}
_SMALL = {"attention dkdv": "Gluon 32 128", "attention dq": "Gluon 128 64"}
for _d, _also in (
    (64, ("alibi, causal, dropout", "softcap, causal, dropout")),
    (128, ("packed, causal, dropout",)),
):
    for _mask in (
        "plain",
        "plain, dropout",
        "causal",
        "causal, dropout",
        "key mask",
        "key mask, dropout",
        "window, bottom-right, lengths, dropout",
        *_also,
    ):
        _case = CASES[f"sm_90 attention bf16 D={_d} {_mask}"]
        CASES[f"sm_90 attention bf16 D={_d} {_mask}, Gluon backward"] = {
            **_case,
            "choices": _BACKWARD,
        }
for _mask in ("2-D mask, dropout", "key bias, dropout", f"{_EVERY}, dropout"):
    for _d in (64, 128):
        CASES[f"sm_90 attention bf16 D={_d} {_mask}, Gluon backward"] = _case = {
            **CASES[f"sm_90 attention bf16 D={_d} {_mask}"],
            "choices": _SMALL if _d == 128 and "bias" in _mask else _BACKWARD,
        }
        if "2-D bias" in _mask:  # of each sequence and head
            _name = f"sm_90 attention bf16 D={_d} {_mask}, own bias, Gluon backward"
            _tiles = {**_case["choices"], "attention dq": "Gluon 128 64"}
            CASES[_name] = {**_case, "bias": "own bf16", "choices": _tiles}

for _mask in ("plain", "causal, dropout"):
    CASES[f"sm_90 attention bf16 D=256 {_mask}, Gluon backward"] = {
        **CASES[f"sm_90 attention bf16 D=256 {_mask}"],
        "choices": {"attention dq": "Gluon 128 32"},
    }

for _drop in ("", ", dropout"):
    CASES[f"sm_90 attention bf16 D=64 2-D mask, all tiles{_drop}"] = {
        **CASES[f"sm_90 attention bf16 D=64 2-D mask{_drop}"],
        "choices": {f"attention {way} bounds": "all tiles" for way in ("forward", "backward")},
    }


def _short(arch: str, kernel: str, d: int, masks: list[str], length: int = 512) -> None:
    """Add cases with a backward in one kernel."""
    for mask in masks:
        kind, drop = mask.removesuffix(", dropout"), mask.endswith(", dropout")
        shape = dict(arch=arch, op="attention", dtype="bf16", d=d, length=length, dropout=drop)
        choice = {"choices": {"attention short backward": kernel}}
        name = f"{arch} attention bf16 D={d} S={length} {mask}, {kernel}"
        CASES[name] = {**shape, **NOTHING, **MASKS[kind], **choice}


_USUAL = ["plain", "key mask, dropout", "causal, dropout"]
_short("sm_90", "tiny", 64, [*_USUAL, "lengths, dropout"], 128)
_short("sm_90", "tiny", 32, ["key mask, dropout"], 128)
_short("sm_90", "scratch", 64, [*_USUAL, "lengths, dropout", "packed, causal, dropout"])
_short("sm_90", "scratch", 64, ["2-D mask, dropout", f"{_EVERY}, dropout"])
_short("sm_90", "scratch", 64, ["key mask, dropout", "2-D mask, dropout"], 128)
_short("sm_90", "scratch", 128, [*_USUAL, f"{_EVERY}, dropout"])
_short("sm_90", "scratch", 32, ["key mask, dropout"])
for _arch in ("sm_80", "sm_89", "sm_120"):
    _short(_arch, "scratch", 64, [*_USUAL, f"{_EVERY}, dropout"][: 4 if _arch == "sm_80" else 2])
    if _arch == "sm_80":
        _short(_arch, "scratch", 32, ["key mask, dropout"])
_short("sm_100", "scratch", 64, _USUAL)
_attention("sm_120", "bf16", (64, 128), ["key mask"], [True])  # it takes the rows of sm_86
CASES["sm_90 attention bf16 D=64 S=512 key mask, dropout, scratch, shared keys"] = {
    **CASES["sm_90 attention bf16 D=64 S=512 key mask, dropout, scratch"],
    "groups": 2,
}

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
    one_by_one = threading.Lock()

    def work() -> None:
        worker = Worker()
        while True:
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                break
            answers[name] = worker.ask(cases[name])
            with one_by_one:
                if progress:
                    progress(name, answers[name])
        worker.close()

    threads = [threading.Thread(target=work) for _ in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {name: answers[name] for name in cases}


# -------------------------------------------------------------------------------------- the data


def keys(cases: dict[str, Case] = CASES) -> dict[str, str]:
    """Return the key of each case as keys.py makes it: one process, some milliseconds a case."""
    worker = Worker()
    answers = {name: worker.ask({**case, "key": True}) for name, case in cases.items()}
    worker.close()
    errors = [f"{name}: {x['error']}" for name, x in answers.items() if "error" in x]
    if errors:
        raise RuntimeError("\n".join(errors))
    return {name: answer["key"] for name, answer in answers.items()}


def translation(answer: dict[str, Any]) -> str:
    """Return a digest of all that a case launches, in Triton's GPU IR. What LLVM, ptxas and
    nvdisasm make of it depends on Triton's wheel alone, which holds all three.
    """
    facts = ("kernel", "blocks", "programs", "options", "largest", "translated")
    launches = [[record[fact] for fact in facts] for record in answer["records"]]
    return hashlib.sha256(json.dumps(launches).encode()).hexdigest()[:12]


@dataclass
class Table:
    """What is known of the compiled cases. A line of the file holds a case."""

    triton: str
    cases: dict[str, dict[str, Any]]
    # by name: "key", see keys.py; "translation"; "kernels" and "costs", which compile_gate.py and
    # cost.py explain

    @classmethod
    def read(cls, path: Path = DATA) -> Table:
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path = DATA) -> None:
        lines = (f"{json.dumps(name)}: {json.dumps(case)}" for name, case in self.cases.items())
        text = f'{{"triton": "{self.triton}", "cases": {{\n' + ",\n".join(lines) + "\n}}\n"
        whole = path.with_suffix(".part")  # a command that is interrupted leaves the old file
        whole.write_text(text)
        whole.replace(path)

    def stale(self, keys: dict[str, str]) -> list[str]:
        """Return the names of the cases that the table does not know, or not with these keys."""
        return [name for name, key in keys.items() if self.cases.get(name, {}).get("key") != key]
