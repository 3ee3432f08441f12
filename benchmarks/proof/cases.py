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
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
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
    "packed": {"packed": True},
    "packed, causal": {"packed": True, "causal": True},
    "packed, key bias": {"packed": True, "bias": "key fp32"},
    "packed, alibi, softcap, causal": {
        "packed": True, "alibi": True, "softcap": 50.0, "causal": True,
    },
    "2-D mask of numbers": {"bias": "mask bf16"},
    "unaligned 2-D mask, 2-D bias": {"mask": "2d", "bias": "2d bf16", "length": 4099},
    "block mask": {"mask": "blocks"},
    "block mask, 2-D bias, causal, lengths": {
        "mask": "blocks", "bias": "2d bf16", "causal": True, "lengths": True,
    },
    "block mask, packed, causal": {"mask": "blocks", "packed": True, "causal": True},
}  # fmt: skip
NOTHING = dict(
    mask="", bias="", causal=False, lengths=False, window=None, alignment="top_left", alibi=False,
    softcap=None, sinks=False, packed=False,
)  # fmt: skip


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
}  # fmt: skip


def _facts(op: str, size: int, kind: str) -> Case:
    """Return what a case is beside its size, by the words of its name."""
    drop, words = kind.endswith(", dropout"), kind.split(", ")
    if op == "attention":
        return {"length": 4096, "dropout": drop, **NOTHING, **MASKS[kind.removesuffix(", dropout")]}
    if op == "decode":
        return {"length": 4096, "queries": 1, **NOTHING, **DECODED[kind]}
    if op == "feed_forward":
        return {"activation": words[0], "dropout": drop}
    if op == "gated_activation":
        return {"limit": kind == "limit"}
    if op == "layer_norm":
        return {"unbiased": kind == "unbiased"}
    if op == "cross_entropy":
        return {"ahead": kind == "ahead", "every": kind == "every option"}
    if op.startswith("dropout_add"):
        return {"input_bias": kind == "input_bias"}
    if op == "rotary_embedding":
        part = 4 if "quarter" in words else 2 if "partial" in words else 1
        turned = {"norm": "norm" in words, "interleaved": "interleaved" in words}
        return {"rotary": size // part, **turned}
    return {}


LETTERS = dict.fromkeys(("attention", "decode", "rotary_embedding", "feed_forward", "product"), "d")
LETTERS["cross_entropy"] = LETTERS["linear_kl_div"] = "v"


def _add(
    arch: str, op: str, dtype: str, sizes: Iterable[int], kinds: Iterable[str] = ("",)
) -> None:
    """Add a case of each size and kind. The size of a feed_forward is not in its name."""
    letter, kinds = LETTERS.get(op, "n"), [*kinds]
    for size in sizes:
        shown = "" if op == "feed_forward" else f" {letter.upper()}={size}"
        for kind in kinds:
            case = {"arch": arch, "op": op, "dtype": dtype, letter: size}
            name = f"{arch} {op} {dtype}{shown} {kind}".rstrip()
            CASES[name] = {**case, **_facts(op, size, kind)}


def _dropped(kinds: Iterable[str], *dropout: str) -> list[str]:
    return [kind + drop for kind in kinds for drop in dropout or (", dropout",)]


_BOTH = "", ", dropout"
_EVERY = "2-D mask, 2-D bias, causal, lengths"
_WITH_EVERY = [f"{_EVERY}, dropout"]
_CAUSAL = "lengths, causal"
_KINDS = [kind for kind in MASKS if not kind.startswith("block mask")]
_BLOCKS = "block mask, 2-D bias, causal, lengths"
for _arch in ("sm_90", "sm_80"):
    _add(_arch, "attention", "bf16", (64, 128), _dropped(["block mask"], *_BOTH))
    _add(_arch, "attention", "bf16", (64, 128, 256), ["block mask, packed, causal"])
    _add(_arch, "attention", "bf16", (256,), ["block mask"])
    _add(_arch, "attention", "bf16", (64, 128), _dropped([_BLOCKS]))
_add("sm_90", "attention", "fp32", (64,), _dropped(["block mask"]))
_add("sm_100", "attention", "bf16", (64, 128), ["block mask"])
_add("sm_90", "attention", "bf16", (64, 128, 256), _dropped(_KINDS[:6], *_BOTH))
_add("sm_90", "attention", "bf16", (64, 128, 256), _dropped(_KINDS[6:10]))
_add("sm_90", "attention", "bf16", (64, 128), _dropped(_KINDS[10:]))
_add("sm_90", "attention", "bf16", (64,), ["2-D mask of numbers"])
_add("sm_90", "attention", "bf16", (64, 128), ["sinks, window"])
_add("sm_80", "attention", "bf16", (64, 128), ["sinks, window, dropout"])
_add("sm_80", "attention", "bf16", (128,), _dropped(_KINDS[-1:]))
_add("sm_90", "attention", "bf16", (256,), _dropped(["window, bottom-right, lengths", "packed"]))
_add("sm_90", "attention", "bf16", (16, 32, 80), _WITH_EVERY)
_add("sm_90", "attention", "bf16", (512,), ["plain", "causal"])
_WIDE = "key mask", "window", "packed, causal", _EVERY
_add("sm_90", "attention", "bf16", (512,), _dropped(_WIDE))
_add("sm_80", "attention", "bf16", (512,), _dropped(["causal", _EVERY]))
for _arch in ("sm_89", "sm_100", "sm_120"):
    _add(_arch, "attention", "bf16", (512,), ["causal", "key mask, dropout", _EVERY])
    _add(_arch, "decode", "bf16", (512,), [_CAUSAL])
_add("sm_90", "attention", "fp32", (32, 64, 128, 256), _WITH_EVERY)
_add("sm_90", "attention", "fp32", (64, 128), ["causal"])
_add("sm_90", "decode", "bf16", (128,), DECODED)
_add("sm_90", "decode", "bf16", (64, 256, 512), [_CAUSAL, "key mask"])
_add("sm_80", "decode", "bf16", (512,), [_CAUSAL])
for _arch in ("sm_80", "sm_90", "sm_100"):
    _add(_arch, "decode", "fp16", (128,), [_CAUSAL])
    _add(_arch, "decode", "fp32", (64,), [_CAUSAL])
_add("sm_90", "layer_norm", "bf16", (512, 4096, 8192, 16384))
_add("sm_90", "layer_norm", "bf16", (512, 16384), ["unbiased"])
_add("sm_90", "layer_norm", "fp32", (512, 8192, 16384))
_add("sm_90", "rms_norm", "bf16", (512, 16384))
_add("sm_90", "dropout_add_layer_norm", "bf16", (512, 1024, 4096, 8192, 16384))
_add("sm_90", "dropout_add_layer_norm", "fp32", (512, 8192))
_add("sm_90", "dropout_add_rms_norm", "bf16", (512, 8192, 16384))
_add("sm_90", "dropout_add_layer_norm", "bf16", (512, 1024, 4096, 8192, 16384), ["input_bias"])
_add("sm_90", "dropout_add_rms_norm", "bf16", (512,), ["input_bias"])
_add("sm_90", "embed", "bf16", (512, 4096))
_add("sm_90", "rotary_embedding", "bf16", (64, 128, 256), ["", "norm"])
_TURNED = "interleaved", "interleaved, norm", "partial, norm"
_add("sm_90", "rotary_embedding", "bf16", (128,), _TURNED)
_add("sm_90", "rotary_embedding", "bf16", (64,), ["quarter, norm"])
_add("sm_90", "rotary_embedding", "fp32", (128,), ["norm"])
_add("sm_90", "cross_entropy", "bf16", (512, 32768, 50257))
_add("sm_90", "cross_entropy", "fp32", (32768,))
_add("sm_90", "cross_entropy", "bf16", (32768, 50257), ["ahead", "every option"])
_add("sm_90", "linear_kl_div", "bf16", (32768,))
_ACTIVATIONS = "relu", "gelu", "gelu_tanh", "silu", "sigmoid", "relu2"
_add("sm_90", "feed_forward", "bf16", (1024,), _dropped(_ACTIVATIONS, *_BOTH))
_add("sm_90", "feed_forward", "fp32", (1024,), _dropped(["relu", "gelu"]))
for _dtype in ("bf16", "fp32"):
    _add("sm_90", "product", _dtype, (1024, 1040))
for _op, _dtype in (("geglu", "bf16"), ("geglu", "fp32"), ("swiglu", "bf16")):
    _add("sm_90", _op, _dtype, (4096,))
_add("sm_90", "gated_activation", "bf16", (4096,), ["", "limit"])
for _arch in ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "other"):
    _add(_arch, "decode", "bf16", (128, 256), [_CAUSAL])
    _add(_arch, "decode", "fp32", (128, 256), [_CAUSAL])
for _arch in ("sm_80", "sm_89", "sm_100", "sm_120", "other"):
    _add(_arch, "attention", "bf16", (128,), ["causal"])
    _add(_arch, "attention", "bf16", (64, 128, 256), ["key mask, dropout"])
    _add(_arch, "attention", "bf16", (64, 128, 256), _WITH_EVERY)
    _add(_arch, "attention", "fp32", (64, 128, 256), _WITH_EVERY)
    _add(_arch, "layer_norm", "bf16", (8192, 16384))
    _add(_arch, "dropout_add_layer_norm", "bf16", (512, 8192))
    _add(_arch, "dropout_add_layer_norm", "bf16", (512,), ["input_bias"])
    _add(_arch, "embed", "bf16", (512,))
    _add(_arch, "rotary_embedding", "bf16", (128,), ["norm"])
    _add(_arch, "geglu", "bf16", (4096,))
    _add(_arch, "cross_entropy", "bf16", (32768,))
    _add(_arch, "feed_forward", "bf16", (1024,), _dropped(["relu", "gelu"]))
    _add(_arch, "feed_forward", "fp32", (1024,), ["gelu, dropout"])
    _add(_arch, "product", "bf16", (1024,))
    _add(_arch, "product", "fp32", (1024,))
_add("sm_103", "attention", "bf16", (64, 128, 256), _WITH_EVERY)  # it takes the rows of sm_100
_add("sm_103", "attention", "fp32", (128,), _WITH_EVERY)
_add("sm_103", "feed_forward", "bf16", (1024,), ["gelu, dropout"])


def _variant(name: str, suffix: str, **facts: Any) -> None:
    """Add a known case once more, with other facts."""
    CASES[f"{name}, {suffix}"] = {**CASES[name], **facts}


_by_torch = {"feed_forward first": "torch"}
_variant("sm_90 feed_forward bf16 gelu, dropout", "torch's GEMM", choices=_by_torch)
_variant("sm_90 decode bf16 D=128 one query, lengths", "batch-invariant", invariant=True)


def _attention(
    arch: str, d: int, kind: str, suffix: str, choices: dict[str, Any], **facts: Any
) -> None:
    """Add a case of attention in bfloat16 with choices, which the suffix names."""
    case = {"arch": arch, "op": "attention", "dtype": "bf16", "d": d}
    case |= {**_facts("attention", d, kind), "choices": choices, **facts}
    size = f"D={d} S={facts['length']}" if "length" in facts else f"D={d}"
    CASES[f"{arch} attention bf16 {size} {kind}, {suffix}"] = case


def _bounds(choice: str) -> dict[str, str]:
    return {f"attention {way} bounds": choice for way in ("forward", "backward")}


def _hopper(dims: Iterable[int], kinds: Iterable[str], row: str = "Gluon 128 128") -> None:
    """Add cases with the forward for Hopper; a name leaves out its first row."""
    for d in dims:
        for kind in kinds:
            suffix = "Gluon" if row == "Gluon 128 128" else row
            _attention("sm_90", d, kind, suffix, {"attention forward": row})


_hopper((64, 128), ["plain", "plain, dropout", "causal", "causal, dropout", "key mask"])
_hopper((64, 128), ["key mask, dropout", "window, bottom-right, lengths", "softcap, causal"])
_hopper((64, 128), ["key bias"])
_hopper((64,), ["2-D bias", "alibi, causal", "2-D mask, dropout"])
_hopper((128,), ["2-D bias, dropout", "2-D mask"])
_hopper((128,), _WITH_EVERY, "Gluon 128 64")
_hopper((64, 128), ["block mask", "block mask, dropout"], "Gluon 128 64")
_hopper((64, 128), _dropped([_BLOCKS]), "Gluon 128 64")
_hopper((256,), ["plain", "causal, dropout", "key mask"], "Gluon 128 64")
_hopper((128,), ["causal", "2-D mask, causal, lengths"], "Gluon 128 128, packed")

_BACKWARD = {"attention dkdv": "Gluon 64 128", "attention dq": "Gluon 128 128"}
_SMALL = {"attention dkdv": "Gluon 32 128", "attention dq": "Gluon 128 64"}
_OF_BOTH = _dropped(["plain", "causal", "key mask"], *_BOTH)
_OF_BOTH += ["window, bottom-right, lengths, dropout"]
for _d, _also in (64, ["alibi, causal, dropout", "softcap, causal, dropout"]), (128, []):
    for _kind in _OF_BOTH + _also:
        _attention("sm_90", _d, _kind, "Gluon backward", _BACKWARD)
for _d in (64, 128):
    for _kind in ["block mask", *_dropped(["block mask", _BLOCKS])]:
        _rows = 32 if _d == 128 and "dropout" in _kind else 64
        _tiles = {"attention dkdv": f"Gluon {_rows} 64", "attention dq": "Gluon 128 64"}
        if _d == 128 and "causal" in _kind:
            del _tiles["attention dkdv"]  # too many registers
        _attention("sm_90", _d, _kind, "Gluon backward", _tiles)
for _kind in ("2-D mask, dropout", "key bias, dropout", *_WITH_EVERY):
    for _d in (64, 128):
        _tiles = _SMALL if _d == 128 and "bias" in _kind else _BACKWARD
        _attention("sm_90", _d, _kind, "Gluon backward", _tiles)
        if "2-D bias" in _kind:  # of each sequence and head
            _tiles = {**_tiles, "attention dq": "Gluon 128 64"}
            _attention("sm_90", _d, _kind, "own bias, Gluon backward", _tiles, bias="own bf16")
for _kind in ("plain", "causal, dropout"):
    _attention("sm_90", 256, _kind, "Gluon backward", {"attention dq": "Gluon 128 32"})
for _drop in _BOTH:
    CASES[f"sm_90 attention bf16 D=64 2-D mask, all tiles{_drop}"] = {
        **CASES[f"sm_90 attention bf16 D=64 2-D mask{_drop}"],
        "choices": _bounds("all tiles"),
    }


def _short(arch: str, kernel: str, d: int, kinds: list[str], length: int = 512) -> None:
    """Add cases with a backward in one kernel."""
    for kind in kinds:
        _attention(arch, d, kind, kernel, {"attention short backward": kernel}, length=length)


_USUAL = ["plain", "key mask, dropout", "causal, dropout"]
_short("sm_90", "tiny", 64, [*_USUAL, "lengths, dropout"], 128)
_short("sm_90", "tiny", 32, ["key mask, dropout"], 128)
_short("sm_90", "scratch", 64, [*_USUAL, "lengths, dropout", "packed, causal, dropout"])
_short("sm_90", "scratch", 64, ["2-D mask, dropout", f"{_EVERY}, dropout"])
_short("sm_90", "scratch", 64, ["key mask, dropout", "2-D mask, dropout"], 128)
_short("sm_90", "scratch", 128, [*_USUAL, f"{_EVERY}, dropout"])
_short("sm_90", "scratch", 32, ["key mask, dropout"])
_short("sm_80", "scratch", 64, [*_USUAL, f"{_EVERY}, dropout"])
_short("sm_80", "scratch", 32, ["key mask, dropout"])
for _arch in ("sm_89", "sm_120"):
    _short(_arch, "scratch", 64, _USUAL[:2])
_short("sm_100", "scratch", 64, _USUAL)
_SEPARATE = {"attention short backward": "separate kernels"}
for _arch, _d in (("sm_90", 64), ("sm_90", 128), ("sm_80", 64), ("sm_100", 64)):
    _ways = _SEPARATE | _bounds("bounds")
    _attention(_arch, _d, "key mask, dropout", "bounds in the kernels", _ways, length=512)
_64_WIDE = {"attention forward": [64, 64, 4, 3]}
_attention("sm_90", 64, "key mask, dropout", "64 64 4 3", _64_WIDE)
# The kernels in Gluon at the standard shapes: at S = 512 and B = 64 they read bounds of the mask.
for _s, _read in ((128, "all tiles"), (512, "bounds")):
    _ways = {"attention forward": "Gluon 128 128"} | _BACKWARD | _SEPARATE | _bounds(_read)
    _attention("sm_90", 64, "key mask, dropout", "Gluon", _ways, length=_s)
_variant("sm_90 attention bf16 D=64 S=512 key mask, dropout, scratch", "shared keys", groups=2)

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


def compile_all(
    names: Iterable[str], translations: dict[str, str]
) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Yield the name of each case and the worker's answer as soon as it is there: {"records",
    "limit", "seconds"} or {"error"}; None if the case is translated as it was before.
    """
    free: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    workers = [Worker() for _ in range(WORKERS)]

    def ask(name: str) -> tuple[str, dict[str, Any] | None]:
        worker = free.get()
        try:
            if name in translations:
                answer = worker.ask({**CASES[name], "translate": True})
                if "error" not in answer and translation(answer) == translations[name]:
                    return name, None
            return name, worker.ask(CASES[name])
        finally:
            free.put(worker)

    for worker in workers:
        free.put(worker)
    with ThreadPoolExecutor(WORKERS) as pool:
        for done in as_completed([pool.submit(ask, name) for name in names]):
            yield done.result()
    for worker in workers:
        worker.close()


# -------------------------------------------------------------------------------------- the data


def keys() -> dict[str, str]:
    """Return the key of each case as keys.py makes it: one process, some milliseconds a case."""
    worker = Worker()
    answers = {name: worker.ask({**case, "key": True}) for name, case in CASES.items()}
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

    def spills(self) -> dict[str, dict[str, tuple[int, str]]]:
        """Return (bytes of spill, serialised wgmma) of each kernel, by architecture and digest."""
        found: dict[str, dict[str, tuple[int, str]]] = {}
        for name, case in self.cases.items():
            for _, _, _, spill, serialised, *_, digest in case["kernels"]:
                found.setdefault(name.split()[0], {})[digest] = spill, serialised
        return found
