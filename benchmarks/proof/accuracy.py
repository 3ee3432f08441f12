"""The accuracy ledger: the error of each op against float64, forward and gradients, beside that of
eager PyTorch in the same dtype.

    python -m benchmarks.proof.accuracy                      writes benchmarks/results/accuracy.csv
                                                             in a minute or two on a CPU
    python -m benchmarks.proof.accuracy --op layer_norm --dtype float32  computes and prints a part
    python -m benchmarks.proof.accuracy --out FOLDER         writes it to another folder

The oracle is the written-out formula in float64, from the same inputs rounded to the dtype. The
providers are `eager`, that formula in the dtype, by ops of torch; `reference`; and `triton`, which
is interpreted without a GPU. A run on a GPU writes a file with the GPU's name. Each row has its own
seed: a part gives the same figures as the whole.

    benign   the tests' usual inputs, whose softmax is not flat
    ill      logits up to 120 (attention) and some 150 (losses); a mean of 1000 times the spread, in
             16 bits 32 times (layer_norm); magnitudes of 1e4 (rms_norm); arguments of the
             activation up to some 100, and 30 of relu2 (feed-forward); positions that cancel most
             of the embedding (embed); heads of 1000, one feature of which is 50 times the others
             (rotary_embedding)

    max error    max |x - oracle|
    error        |x - oracle| / |oracle|, Frobenius norms
    ratio        error divided by that of eager, which counts as at least eps / 8 of the dtype
    of limit     the share of the error that the numerics policy allows, see `_of_limit`

tests/proof/test_accuracy.py recomputes a sample and compares it to the policy and to the ledger.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import re
import sys
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

# Otherwise the interpreter's sums depend on the cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torch
from torch import Tensor

import fastformer as ff
from benchmarks import ROOT, folder
from benchmarks.peers import tutorial_norm
from fastformer import numerics
from fastformer.dispatch import state

RESULTS = ROOT / "benchmarks" / "results"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
CONDITIONS = ("benign", "ill")
OURS = ("reference", "triton")
KEY = ("op", "case", "condition", "dtype", "quantity", "provider")
FIGURES = ("max error", "error", "ratio", "of limit")
CONSTANT = ("cos", "sin", "teacher_input", "teacher_weight", "teacher_bias")  # without a gradient

Tensors = dict[str, Tensor]
Row = dict[str, Any]


class Case(NamedTuple):
    """A call. `make(ill, dtype, *sizes)` returns its tensors, the floating ones in float32."""

    op: str
    name: str
    make: Callable[..., Tensors]
    sizes: tuple[Any, ...]
    options: dict[str, Any] = {}  # noqa: RUF012
    sampled: bool = True  # whether the tests compute it; the others take long

    def __str__(self) -> str:
        return f"{self.op}, {self.name}"


# ----------------------------------------------------------------------------------------- inputs
# Each function takes whether the inputs are ill-conditioned, the dtype, and sizes.


def _qkv(
    ill: bool, dtype: torch.dtype, b: int, h: int, sq: int, sk: int, d: int, g: int = 0,
    **more: Callable[[], Tensor],
) -> Tensors:  # fmt: skip
    q = torch.randn(b, h, sq, d) * 3
    k, v = torch.randn(b, g or h, sk, d), torch.randn(b, g or h, sk, d)
    if ill:
        logits = q @ k.repeat_interleave(h // (g or h), 1).transpose(2, 3) / d**0.5
        q = q * (120 / logits.abs().max())
    return {"query": q, "key": k, "value": v, **{name: x() for name, x in more.items()}}


def _packed(
    ill: bool, dtype: torch.dtype, lengths: Sequence[int], h: int, d: int,
    **more: Callable[[], Tensor],
) -> Tensors:  # fmt: skip
    x = _qkv(ill, dtype, 1, h, sum(lengths), sum(lengths), d)
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    tokens = {name: t[0].transpose(0, 1).contiguous() for name, t in x.items()}
    given = {name: x() for name, x in more.items()}
    return {**tokens, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets, **given}


def _norm(ill: bool, dtype: torch.dtype, rows: int, n: int) -> Tensors:
    spread, mean = (1, 1000 if dtype == torch.float32 else 32) if ill else (3, 2)
    x = torch.randn(rows, n) * spread + mean
    return {"input": x, "weight": torch.randn(n), "bias": torch.randn(n)}


def _rms(ill: bool, dtype: torch.dtype, rows: int, n: int) -> Tensors:
    return {"input": torch.randn(rows, n) * (1e4 if ill else 3), "weight": torch.randn(n)}


def _added(ill: bool, dtype: torch.dtype, rows: int, n: int, norm: Any = _norm) -> Tensors:
    x = norm(ill, dtype, rows, n)
    return {"input": torch.randn(rows, n), "residual": x.pop("input"), **x}


def _biased(*given: Any) -> Tensors:
    x = _added(*given)
    return {**x, "input_bias": torch.randn(x["input"].shape[1])}


def _layers(
    ill: bool, dtype: torch.dtype, rows: int, d: int, width: int, halves: int = 1,
    scale: float = 30.0,
) -> Tensors:  # fmt: skip
    names = ("w_1", "b_1") if halves == 1 else ("w", "b")
    hidden = halves * width
    w, b = torch.randn(hidden, d) / d**0.5, torch.randn(hidden) * 0.5
    w_2, b_2 = torch.randn(d, width) / width**0.5, torch.randn(d) * 0.5
    x = torch.randn(rows, d) * (scale if ill else 1.0)
    return {"input": x, names[0]: w, names[1]: b, "w_2": w_2, "b_2": b_2}


def _halves(ill: bool, dtype: torch.dtype, rows: int, width: int) -> Tensors:
    gate = torch.randn(rows, width) * (30.0 if ill else 1.0)
    return {"gate": gate, "value": torch.randn(rows, width)}


def _embedded(ill: bool, dtype: torch.dtype, b: int, s: int, v: int, n: int) -> Tensors:
    weight, positional = torch.randn(v, n) * (1.0 if ill else n**-0.5), torch.randn(s, n)
    tokens = torch.randint(0, v, (b, s))
    if ill:
        positional = positional * 0.01 - weight[tokens[0]] * n**0.5
    return {"weight": weight, "positional": positional, "tokens": tokens}


def _rotary(
    ill: bool, dtype: torch.dtype, b: int, h: int, s: int, d: int, r: int, norms: bool = True
) -> Tensors:
    query, key = torch.randn(b, h, s, d), torch.randn(b, max(1, h // 2), s, d)
    if ill:
        query, key = query * 1000, key * 1000
        query[..., 1], key[..., d // 2] = 50000.0, -50000.0
    angles = (torch.arange(s).view(-1, 1) * 1e4 ** (-torch.arange(0, r, 2) / r)).repeat(1, 2)
    given = {"query": query, "key": key, "cos": angles.cos(), "sin": angles.sin()}
    if norms:
        given |= {"query_norm": torch.randn(d), "key_norm": torch.randn(d)}
    return given


def _classes(ill: bool, dtype: torch.dtype, rows: int, v: int, width: int = 0) -> Tensors:
    size = 40.0 if ill else 4.0
    target = torch.randint(1, v, (rows,))
    if not width:
        return {"logits": torch.randn(rows, v) * size, "target": target}
    w, b = torch.randn(v, width) / width**0.5, torch.randn(v)
    x = torch.randn(rows, width) * size
    return {"input": x, "linear_weight": w, "linear_bias": b, "target": target}


def _distilled(ill: bool, dtype: torch.dtype, rows: int, v: int, width: int, k: int) -> Tensors:
    student, teacher = (_classes(ill, dtype, rows, v, n) for n in (width, k))
    teacher = {f"teacher_{name.removeprefix('linear_')}": x for name, x in teacher.items()}
    given = {**student, **teacher, "mask": torch.arange(rows) % 4 != 1}
    return {name: x for name, x in given.items() if "target" not in name}


_DROPOUT = {"dropout_p": 0.1, "dropout_seed": 7}
_CLAMPED = {"alpha": 1.702, "limit": 1.0, "offset": 1.0}
_NONE = {"reduction": "none", "label_smoothing": 0.1}
_FORM = {"reduction": "none", "z_loss": 1e-3, "softcap": 30.0, "temperature": 0.7}
_ENTROPY = {**_FORM, "return_entropy": True}
_KL = {"reduction": "sum", "smoothing": "kl", "ignore_index": 0, "label_smoothing": 0.1}


def _window(n: int, sinks: int = 0) -> Tensor:
    """The mask of a causal window of 91 tokens, and the first `sinks`."""
    near = torch.ones(n, n, dtype=torch.bool).tril().triu(-90)
    near[:, :sinks] |= torch.ones(n, sinks, dtype=torch.bool).tril()
    return near


_attention = partial(Case, "scaled_dot_product_attention")
_bias = partial(_qkv, bias=lambda: torch.randn(2, 100, 100))
_lengths = partial(_qkv, key_lengths=lambda: torch.tensor([100, 37]))
_blocks = partial(_qkv, blocks=lambda: _window(300))
_holes = partial(_qkv, attn_mask=lambda: _window(300, 20))
_packed_blocks = partial(_packed, blocks=lambda: _window(264, 5))

CASES = [
    _attention("65x127, D 40", _qkv, (2, 2, 65, 127, 40)),
    _attention("one query, D 64", _qkv, (8, 8, 1, 200, 64)),
    _attention("200, D 128, causal", _qkv, (1, 2, 200, 200, 128), {"is_causal": True}),
    _attention("1000, D 64", _qkv, (1, 2, 1000, 1000, 64), {}, False),
    _attention("100, D 256", _qkv, (1, 2, 100, 100, 256)),
    _attention("100, D 64, bias", _bias, (2, 2, 100, 100, 64)),
    _attention(
        "100, D 64, lengths, grouped heads", _lengths, (2, 4, 100, 100, 64, 2), {"enable_gqa": True}
    ),
    _attention("100, D 64, lengths, dropout", _lengths, (2, 2, 100, 100, 64), _DROPOUT),
    _attention("300, D 64, block mask", _blocks, (1, 2, 300, 300, 64)),
    _attention("300, D 64, mask with holes", _holes, (1, 2, 300, 300, 64)),
    Case(
        "packed_attention", "63 + 1 + 100, D 64, causal", _packed, ((63, 1, 100), 2, 64),
        {"max_q": 100, "max_k": 100, "is_causal": True},
    ),
    Case(
        "packed_attention", "63 + 1 + 200, D 64, block mask", _packed_blocks,
        ((63, 1, 200), 2, 64), {"max_q": 200, "max_k": 200},
    ),
    Case("layer_norm", "37 x 100", _norm, (37, 100)),
    Case("layer_norm", "512 x 512", _norm, (512, 512), {}, False),
    Case("layer_norm", "5 x 20000", _norm, (5, 20000), {}, False),
    Case("layer_norm", "64 x 512, unbiased", _norm, (64, 512), {"unbiased": True, "eps": 1e-6}),
    Case("rms_norm", "37 x 100", _rms, (37, 100)),
    Case("rms_norm", "512 x 512", _rms, (512, 512), {}, False),
    Case("rms_norm", "5 x 20000", _rms, (5, 20000), {}, False),
    Case("dropout_add_layer_norm", "37 x 100, dropout", _added, (37, 100), _DROPOUT),
    Case("dropout_add_layer_norm", "512 x 512", _added, (512, 512), {}, False),
    Case("dropout_add_rms_norm", "37 x 100, dropout", _added, (37, 100, _rms), _DROPOUT),
    Case("dropout_add_layer_norm", "37 x 100, input bias", _biased, (37, 100), _DROPOUT),
    Case("dropout_add_rms_norm", "37 x 100, input bias", _biased, (37, 100, _rms), _DROPOUT),
    Case("feed_forward", "37, 24 -> 70, relu, dropout", _layers, (37, 24, 70), _DROPOUT),
    Case("feed_forward", "256, 128 -> 512, relu", _layers, (256, 128, 512), {}, False),
    *(
        Case("feed_forward", f"100, 64 -> 256, {act}", _layers, (100, 64, 256), {"activation": act})
        for act in ("gelu", "gelu_tanh", "silu", "sigmoid")
    ),
    Case(
        "feed_forward", "100, 64 -> 256, relu2", partial(_layers, scale=8.0), (100, 64, 256),
        {"activation": "relu2"},
    ),
    Case("geglu", "37, 24 -> 70", _layers, (37, 24, 70, 2)),
    Case("geglu", "256, 128 -> 512", _layers, (256, 128, 512, 2), {}, False),
    Case("swiglu", "37, 24 -> 70", _layers, (37, 24, 70, 2)),
    Case("swiglu", "256, 128 -> 512", _layers, (256, 128, 512, 2), {}, False),
    Case("gated_activation", "37 x 70", _halves, (37, 70)),
    Case("gated_activation", "37 x 70, clamped", _halves, (37, 70), _CLAMPED),
    Case("gated_activation", "37 x 70, sigmoid", _halves, (37, 70), {"activation": "sigmoid"}),
    Case("embed", "3 x 7, N 40, dropout", _embedded, (3, 7, 23, 40), _DROPOUT),
    Case("embed", "8 x 64, N 512", _embedded, (8, 64, 200, 512), {}, False),
    Case("rotary_embedding", "2 x 30, D 64, norms", _rotary, (2, 4, 30, 64, 64)),
    Case("rotary_embedding", "2 x 30, D 40, 16 turned", _rotary, (2, 2, 30, 40, 16, False)),
    Case("rotary_embedding", "4 x 128, D 128, norms", _rotary, (4, 8, 128, 128, 128), {}, False),
    Case("cross_entropy", "23 x 37, none", _classes, (23, 37), _NONE),
    Case("cross_entropy", "64 x 5000, none", _classes, (64, 5000), _NONE, False),
    Case("cross_entropy", "64 x 1000, kl", _classes, (64, 1000), _KL),
    Case("cross_entropy", "64 x 1000, z-loss, softcap, temperature", _classes, (64, 1000), _FORM),
    Case("cross_entropy", "64 x 1000, entropy", _classes, (64, 1000), _ENTROPY),
    Case("linear_cross_entropy", "23, 24 -> 37, mean", _classes, (23, 37, 24)),
    Case("linear_cross_entropy", "100, 64 -> 1000, none", _classes, (100, 1000, 64), _NONE),
    Case("linear_cross_entropy", "100, 64 -> 1000, kl", _classes, (100, 1000, 64), _KL),
    Case("linear_cross_entropy", "100, 64 -> 1000, entropy", _classes, (100, 1000, 64), _ENTROPY),
    Case("linear_kl_div", "23, 24 and 16 -> 37, mean", _distilled, (23, 37, 24, 16)),
    Case(
        "linear_kl_div", "50, 64 and 48 -> 500, reverse, softcap, temperature",
        _distilled, (50, 500, 64, 48),
        {"reverse": True, "reduction": "none", "softcap": 30.0, "temperature": 0.7},
    ),
]  # fmt: skip


# ---------------------------------------------------------------------------------------- results


def call(op: str, blocks: Tensor | None = None, **inputs: Any) -> Tensor:
    """Call an op, and join its outputs."""
    if blocks is not None:
        inputs["attn_mask"] = ff.block_mask(blocks)
    if op in ("layer_norm", "rms_norm"):
        inputs["normalized_shape"] = inputs["weight"].shape
    found = getattr(ff, op)(**inputs)
    if not isinstance(found, tuple):
        return found
    return torch.cat(found, 1 if op == "rotary_embedding" else 0)


def by_tutorial(op: str, input: Tensor, unbiased: bool, **parameters: Any) -> Tensor:
    """Compute `layer_norm` with unbiased=True as the Annotated Transformer does. (The formula of
    fastformer calls torch.std_mean, which computes the mean in float64 on a CPU.)
    """
    return tutorial_norm(input, **parameters)


def results(
    function: Callable[..., Tensor], case: Case, tensors: Tensors, dtype: torch.dtype
) -> Tensors:
    """Return the output and the gradient of each floating tensor, for a cotangent in `dtype`."""
    leaves = {
        n: x.detach().requires_grad_()
        for n, x in tensors.items()
        if x.is_floating_point() and n not in CONSTANT
    }
    output = function(case.op, **{**tensors, **leaves}, **case.options)
    generator = torch.Generator().manual_seed(1)
    cotangent = torch.randn(output.shape, generator=generator).to(dtype).to(output)
    grads = torch.autograd.grad(output, list(leaves.values()), cotangent)
    return {"output": output.detach(), **{"grad " + n: g for n, g in zip(leaves, grads)}}


@contextlib.contextmanager
def computing(provider: str) -> Iterator[None]:
    """Return a context in which ops are computed by a provider."""
    formula = contextlib.nullcontext() if provider in OURS else state.use_formula()
    with ff.use_backend(provider if provider in OURS else "reference"), formula:
        yield


def measure(case: Case, condition: str, dtype: str, device: torch.device) -> list[Row]:
    """Return the rows of one call: output and gradients of each provider."""
    kind = DTYPES[dtype]
    torch.manual_seed(zlib.crc32(f"{case} {condition}".encode()))
    made = case.make(condition == "ill", kind, *case.sizes)
    tensors = {n: x.to(device, kind if x.is_floating_point() else x.dtype) for n, x in made.items()}
    wide = {n: x.double() if x.is_floating_point() else x for n, x in tensors.items()}
    with computing("eager"):
        oracle = results(call, case, wide, kind)

    rows: dict[tuple[str, str], Row] = {}
    for provider in ("eager", *OURS):
        tutorial = provider == "eager" and case.options.get("unbiased")
        with computing(provider):
            found = results(by_tutorial if tutorial else call, case, tensors, kind)
        for quantity, want in oracle.items():
            off = found[quantity].double() - want
            key = case.op, case.name, condition, dtype, quantity, provider
            rows[provider, quantity] = {
                **dict(zip(KEY, key)),
                "max error": float(off.abs().max()),
                "error": float(off.norm() / want.norm()),
                "rounding": _rounding(found[quantity]),
            }
    for row in rows.values():
        quantity = row["quantity"]
        beside, largest = rows["eager", quantity], float(oracle[quantity].abs().max())
        row["ratio"] = row["error"] / max(beside["error"], torch.finfo(kind).eps / 8)
        row["of limit"] = _of_limit(row, beside["max error"], largest)
    return list(rows.values())


# Ill-conditioned attention in float32: a logit of 120 is known to 120 * 2^-24 and the softmax to as
# much. Whoever recomputes it from its log-sum-exp, as torch's fused attention does too, rounds four
# such numbers: the logit, the log-sum-exp, and this in two changes of base.
ROUNDED_LOGITS = 4 * 120 * 2**-24


def _rounding(x: Tensor) -> float:
    """Return a relative error that counts as rounding; that of a single number is mostly luck."""
    return torch.finfo(x.dtype).eps * (0.5 if x.numel() > 1 else 8)


def _of_limit(row: Row, eager: float, largest: float) -> float:
    """Return the share of the error that the numerics policy allows; 1 is all of it.

    Ill-conditioned float32 may have the error that float16 may have beside eager PyTorch as well,
    and attention ROUNDED_LOGITS.
    """
    dtype, gradient = DTYPES[row["dtype"]], row["quantity"] != "output"
    beside_eager = row["max error"] / numerics.largest_error(dtype, eager, largest, gradient)
    if dtype not in numerics.RELATIVE:
        return beside_eager
    if row["condition"] == "benign":
        return row["error"] / numerics.RELATIVE[dtype]
    fixed = ROUNDED_LOGITS if "attention" in row["op"] else numerics.RELATIVE[dtype]
    return min(row["error"] / fixed, beside_eager)


def ledger(
    cases: Iterable[Case],
    dtypes: Collection[str],
    device: torch.device,
    conditions: Collection[str] = CONDITIONS,
) -> list[Row]:
    rows: list[Row] = []
    for case in cases:
        started = time.perf_counter()
        for condition in conditions:
            for dtype in dtypes:
                rows += measure(case, condition, dtype, device)
        print(f"{time.perf_counter() - started:6.1f} s  {case}", file=sys.stderr, flush=True)
    return rows


def worse(row: Row, committed: Row) -> bool:
    """Whether error and ratio of a result are 1.5 times the committed ones, and exceed rounding.

    (Both: on another CPU it may be eager PyTorch that is better.)
    """
    if row["error"] <= row["rounding"]:
        return False
    return all(not row[figure] <= 1.5 * committed[figure] for figure in ("error", "ratio"))


def prepare() -> torch.device:
    """Return the device. Without a GPU, set up the interpreter, in one thread."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    os.environ.setdefault("TRITON_INTERPRET", "1")
    torch.set_num_threads(1)
    from fastformer.kernels import interpreter

    interpreter.repair()
    return torch.device("cpu")


# ------------------------------------------------------------------------------------------- file


def stem(device: torch.device) -> str:
    """Return the name of the ledger's file for this device."""
    if device.type == "cpu":
        return "accuracy"
    return "accuracy-" + re.sub(r"\W+", "-", torch.cuda.get_device_name(device)).strip("-").lower()


def read(path: Path) -> dict[tuple[str, ...], Row]:
    """Read the rows of a ledger, by their KEY."""
    with path.open(newline="") as file:
        rows = [
            {name: float(x) if name in FIGURES else x for name, x in row.items()}
            for row in csv.DictReader(file)
        ]
    return {tuple(row[name] for name in KEY): row for row in rows}


def write_csv(rows: Sequence[Row], file: TextIO) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(KEY + FIGURES)
    for row in rows:
        writer.writerow([row[n] for n in KEY] + [f"{row[n]:.3g}" for n in FIGURES])


def main(argv: Sequence[str] | None = None) -> int:
    """Exit with status 1 if a result exceeds the policy."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.proof.accuracy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, ops = parser.add_argument, sorted({case.op for case in CASES})
    add("--op", action="append", choices=ops, help="only this one")
    add("--dtype", action="append", choices=list(DTYPES), help="only this one")
    add("--out", type=folder, help="the folder, benchmarks/results by default")
    arguments = parser.parse_args(argv)
    device = prepare()
    cases = [case for case in CASES if not arguments.op or case.op in arguments.op]
    rows = ledger(cases, arguments.dtype or DTYPES, device)
    if arguments.out is None and (arguments.op or arguments.dtype):
        write_csv(rows, sys.stdout)
    else:
        path = (arguments.out or RESULTS) / f"{stem(device)}.csv"
        with path.open("w", newline="") as file:
            write_csv(rows, file)
        print(f"Wrote {path}")
    past = [row for row in rows if row["provider"] in OURS and not row["of limit"] <= 1]
    for row in past:
        print("PAST THE LIMIT:", *(row[n] for n in KEY), f"{row['of limit']:.2f}")
    return 1 if past else 0


if __name__ == "__main__":
    sys.exit(main())
