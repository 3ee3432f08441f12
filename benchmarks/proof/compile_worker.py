"""Compiles what a call of an op launches, for a GPU that need not be there. One JSON line each:
a case in, facts out. A case with "translate" is only translated to Triton's GPU IR, the last form
that depends on this package alone: what follows is LLVM, ptxas and nvdisasm of Triton's wheel. For
one with "key", nothing is compiled: the answer is its key (keys.py).

The launchers of kernels/ run on meta tensors. Triton's own run() derives signature, constants
and alignment from their arguments and compiles for the target that a stand-in driver names, without
launching: nothing here repeats what the package launches. compile_gate.py starts this file as a
process of its own, because a compile can die in an assert and because Triton's interpreter, once
chosen, holds for the whole process.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
os.environ["TRITON_INTERPRET"] = "0"
os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"
os.environ.setdefault("TRITON_CACHE_DIR", str(ROOT / ".cache" / "triton"))
sys.path.append(str(ROOT))

import torch
import triton
import triton.language as tl
from fastformer.kernels import embedding, feed_forward, products, rotary, tuned
from fastformer.kernels.attention import launchers as attention
from fastformer.kernels.attention.configurations import AttentionTiles
from fastformer.kernels.cross_entropy import divergence
from fastformer.kernels.cross_entropy import launchers as cross_entropy
from fastformer.kernels.layer_norm import launchers as layer_norm
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.proof import cost, keys, sass
from fastformer.batch_invariance import batch_invariant
from fastformer.description import Attention, pack
from fastformer.plans import forget

# The GPU that stands for each: target, row of the configuration tables, shared memory of a block.
TARGETS: dict[str, tuple[GPUTarget, str, int]] = {
    "sm_80": (GPUTarget("cuda", 80, 32), "sm_80", 166912),
    "sm_89": (GPUTarget("cuda", 89, 32), "sm_86", 101376),
    "sm_90": (GPUTarget("cuda", 90, 32), "sm_90", 232448),
    "sm_100": (GPUTarget("cuda", 100, 32), "sm_100", 232448),
    "sm_103": (GPUTarget("cuda", 103, 32), "sm_100", 232448),
    "sm_120": (GPUTarget("cuda", 120, 32), "sm_86", 101376),
    # one that has no row of its own, with the least that such a GPU has
    "other": (GPUTarget("cuda", 80, 32), "other", 101376),
}
FACTS = {  # of an H100: its multiprocessors, and the bytes of its L2 cache
    "processors": 132,
    "l2_cache": 50 * 2**20,
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Driver:
    """What Triton asks of a driver to compile: each target is a device of its own, and another one
    where nothing is compiled.
    """

    target: GPUTarget
    compiles = True

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> Any:
        return self.target.backend, self.target.arch, self.compiles

    def get_current_stream(self, device: Any) -> int:
        return 0


# ------------------------------------------------------------------------------- reading a kernel


def read_nvidia(kernel: Any, log: str) -> dict[str, Any]:
    ptx, first = kernel.asm["ptx"], kernel.asm["ttir" if "ttir" in kernel.asm else "ttgir"]
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    return dict(
        registers=int(re.findall(r"Used (\d+) registers", log)[-1]),
        spill=sum(map(int, spills)),
        serialised=sorted(set(re.findall(r"\((C75\d\d)\).*serialized", log))),
        matrix=next((m for m in ("tcgen05.mma", "wgmma", "mma.sync") if m in ptx), "-"),
        asynchronous=next((c for c in ("cp.async.bulk", "cp.async") if c in ptx), "-"),
        vectors=bool(
            re.search(r"ld\.global\S*\.v(4|8)\.b32|ld\.global\S*\.v(2|4)\.b64", ptx)
            or re.search(r"cp\.async\.cg\.shared\.global.*, 0x10|cp\.async\.bulk\.tensor", ptx)
        ),
        f64=".f64" in ptx,
        ends_early="cf.cond_br" in first,  # in the first form that the kernel has
        drops_nan=bool(re.search(r"\b(max|min)\.(ftz\.)?b?f\d|\bsetp\.(gt|leu)\.b?f\d", ptx)),
    )


@functools.cache
def read_loops(kernel: Any) -> dict[str, Any]:
    """What cost.py weighs: the instructions of each innermost loop and of the kernel."""
    code, warps = sass.disassemble(kernel.asm["cubin"]), kernel.metadata.num_warps
    loops = [code.instructions[a : b + 1] for a, b in code.loops()]
    ttgir = kernel.asm["ttgir"]
    facts = dict(whole=sass.count(code.instructions, warps), outstanding=sass.outstanding(ttgir))
    facts["beside"] = sass.beside_loops(code, warps)
    if "ttir" not in kernel.asm:  # Gluon: the loops of the consumers, one consumer after the other
        loops = [x for x in loops if any(i.name.startswith("HGMMA") for i in x)]
        n = len(loops) // (1 + len(re.findall(r"partition\d+\(.*num_warps\(4\)", ttgir)))
        each = [sass.together(loops[i::n], warps) for i in range(n)]
        products = [int(x["product"]) for x in each]
        return facts | dict(loops=each, products=products, outstanding=facts["outstanding"] * n)
    loops = [sass.count(x, warps) for x in loops]
    return dict(**facts, loops=loops, products=sass.products(kernel.asm["ttir"]))


def read_products(kernel: Any) -> dict[str, Any]:
    """How float32 operands are to be multiplied, and how many products each such dot has become."""
    if "ttir" not in kernel.asm:  # Gluon begins with the GPU IR, and says what to multiply by
        return dict(dots=kernel.asm["ttgir"].count("ttng.warp_group_dot "))
    dots = re.findall(r"tt\.dot .*", kernel.asm["ttir"])
    singles = [dot for dot in dots if "xf32> * " in dot]
    if not singles:
        return dict(dots=len(dots))
    named = {found[1] for dot in singles if (found := re.search(r"inputPrecision = (\w+)", dot))}
    instructions = r"\b(?:tt\.dot|ttng\.warp_group_dot|ttng\.tc_gen5_mma) "
    products = len(re.findall(instructions, kernel.asm["ttgir"])) / len(dots)
    return dict(dots=len(dots), precision=" ".join(sorted(named)) or "ieee", parts=products)


# --------------------------------------------------------------------------- recording launches


class Translated(Exception):
    """Ends a compile behind Triton's GPU IR, with its digest."""


def end_behind_ttgir(*given: Any) -> Any:
    """Change the stages of a compile, as Triton's hook for that; without arguments, name the change
    for the keys of caches.
    """
    if not given:
        return "translate", "translate"
    stages = given[1]

    def end(module: Any, metadata: Any) -> None:
        raise Translated(sass.digest(str(module)))

    stages["llir"] = end


def named(names: Iterable[Any], values: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """(name, value) of each argument, of a group's fields one by one."""
    for name, value in zip(names, values):
        if isinstance(value, tuple):
            yield from named(value._fields, value)
        else:
            yield name, value.value if isinstance(value, tl.constexpr) else value


class Recorder:
    """Stands in for the launch: compiles, and notes what was compiled."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.records: list[dict[str, Any]] = []
        self.loops = self.translate = False
        driver.set_active(self.driver)
        run_jit, self.compile = JITFunction.run, triton.compiler.compile

        def run(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            kernel = run_jit(function, *args, grid=grid, warmup=True, **options)
            self.note(function, kernel, args, {**options, "grid": grid})

        JITFunction.run = run
        triton.compiler.compile = self.compile_and_read

    def compile_and_read(self, source: Any, target: Any = None, **options: Any) -> Any:
        if not self.driver.compiles:
            facts = source.fn, source.signature, source.constants, source.attrs
            return SimpleNamespace(key=keys.describe(facts))
        if self.translate:
            try:
                self.compile(source, target=target, **options)
            except Translated as found:
                return SimpleNamespace(translated=str(found))
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            kernel = self.compile(source, target=target, **options)
        kept = Path(os.environ["TRITON_CACHE_DIR"]) / f"{kernel.hash}.ptxas"
        if log.getvalue():
            kept.write_text(log.getvalue())
        elif kept.exists():
            log.write(kept.read_text())
        else:  # Triton's cache knows it, but not from here
            os.environ["TRITON_ALWAYS_COMPILE"] = "1"
            try:
                return self.compile_and_read(source, target, **options)
            finally:
                del os.environ["TRITON_ALWAYS_COMPILE"]
        kernel.translated = sass.digest(kernel.asm["ttgir"])
        kernel.facts = read_nvidia(kernel, log.getvalue()) | read_products(kernel)
        return kernel

    def note(self, function: Any, kernel: Any, args: tuple[Any, ...], options: dict) -> None:
        given = dict(named(function.arg_names, args))
        if not self.driver.compiles:
            facts = [*given], options, largest_argument(args)
            self.records.append(dict(key=(kernel.key, keys.describe(facts))))
            return
        sides = dict(rows="rows", columns="columns", features="features", BLOCK="columns")
        sides["row_tiles"] = "row_tiles"  # of an unrolled loop
        record = dict(
            kernel=function.fn.__name__.lstrip("_").removesuffix("_kernel"),
            blocks={side: given[name] for name, side in sides.items() if given.get(name)},
            programs=math.prod(options.pop("grid")),
            stages=options.get("num_stages", 0),
            options=options,
            largest=largest_argument(args),
            translated=kernel.translated,
        )
        if not self.translate:
            record |= dict(
                hash=kernel.hash,
                warps=kernel.metadata.num_warps,
                shared=kernel.metadata.shared,
                tensor_memory=getattr(kernel.metadata, "tmem_size", None) or 0,
                **kernel.facts,
                **(read_loops(kernel) if self.loops else {}),
            )
        self.records.append(record)


large: set[int] = set()  # the memory of the mask and the bias that a call is given


def largest_argument(args: tuple[Any, ...]) -> int:
    """Elements of memory behind the largest tensor that is not in `large`."""
    return max(
        a.untyped_storage().nbytes() // a.element_size()
        for _, a in named(range(len(args)), args)
        if isinstance(a, torch.Tensor) and a.untyped_storage()._cdata not in large
    )


# -------------------------------------------------------------------------------------- the calls


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def given(case: dict[str, Any], kind: str, shapes: dict[str, tuple[int, ...]]) -> Any:
    """Return the mask or the bias of a case, by the word for its shape; a bias also has a dtype."""
    shape, _, dtype = case[kind].partition(" ")
    return empty(*shapes[shape], dtype=DTYPES.get(dtype, torch.bool)) if shape else None


def described(case: dict[str, Any], heads: int, mask: Any, bias: Any, **more: Any) -> Attention:
    dropped = case.get("dropout", False)
    return Attention(
        mask, 0.1 if dropped else 0.0, case["causal"], case["d"] ** -0.5, bias,
        window=case["window"], causal_alignment=case["alignment"], softcap=case["softcap"],
        alibi_slopes=empty(heads, dtype=torch.float32) if case["alibi"] else None,
        sinks=empty(heads, dtype=DTYPES[case["dtype"]]) if case["sinks"] else None,
        dropout_seed=empty(1, dtype=torch.int64) if dropped else None, **more,
    )  # fmt: skip


def call_attention(case: dict[str, Any]) -> None:
    batch, heads, groups, length = 2, 4, case.get("groups", 4), case["length"]
    dtype, d = DTYPES[case["dtype"]], case["d"]
    batch = 1 if d > 256 else batch  # so that only what has Sq * Sk elements has so many
    query, key, value = (empty(batch, n, length, d, dtype=dtype) for n in (heads, groups, groups))
    masks = {"key": (batch, 1, 1, length), "2d": (batch, 1, length, length)}
    biases = {"key": (1, 1, 1, length), "2d": (1, heads, length, length), "mask": masks["2d"]}
    biases["own"] = (batch, heads, length, length)
    learns_bias = bool(case["bias"]) and not case["bias"].startswith("mask")
    blocks = {}
    if case["mask"] == "blocks":
        case, whole = {**case, "mask": ""}, 1 if case["packed"] else batch
        tiles = (length // 128 + length // 64) * batch // whole
        blocks["mask_spans"] = empty(whole, 1, tiles, 5, dtype=torch.int32)
        blocks["mask_lists"] = empty(3, 4096, dtype=torch.int16)
        blocks["mask_bits"] = empty(1024, 256, dtype=torch.int32)
    if case["packed"]:
        forward, backward = attention.packed_forward, attention.packed_backward
        offsets = empty(batch + 1, dtype=torch.int32)
        query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        lengths = dict(cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_q=length, max_k=length)
        biases["key"] = (batch * length,)
    else:
        forward, backward = attention.forward, attention.backward
        lengths = dict(key_lengths=empty(batch, dtype=torch.int32) if case["lengths"] else None)
    mask, bias = given(case, "mask", masks), given(case, "bias", biases)
    large.update(x.untyped_storage()._cdata for x in (mask, bias) if x is not None)
    arguments = pack([query, key, value, described(case, heads, mask, bias, **lengths, **blocks)])
    saved = forward(*arguments, False)
    gradient, needs = empty(*saved[0].shape, dtype=dtype), [True, True, True, learns_bias]
    backward(gradient, None, *arguments, *saved, [*needs, case["sinks"]])


def call_decode(case: dict[str, Any]) -> None:
    """Few queries to many keys, of 32 heads in 8 groups at batch 1."""
    heads, groups, length, queries = 32, 8, case["length"], case["queries"]
    dtype, d = DTYPES[case["dtype"]], case["d"]
    query = empty(1, heads, queries, d, dtype=dtype)
    shapes = {"key": (1, 1, 1, length), "2d": (1, 1, queries, length)}
    lengths = empty(1, dtype=torch.int32) if case["lengths"] else None
    mask, bias = given(case, "mask", shapes), given(case, "bias", shapes)
    options = described(case, heads, mask, bias, key_lengths=lengths)
    keys = (empty(1, groups, length, d, dtype=dtype) for _ in range(2))
    with batch_invariant() if case.get("invariant") else contextlib.nullcontext():
        attention.forward(*pack([query, *keys, options]), False)


def both(module: Any, prefix: str, arguments: tuple[Any, ...], needs: list[bool]) -> None:
    """Call an op's forward and its backward, which takes all that the forward saved."""
    found = getattr(module, f"{prefix}forward")(*arguments)
    output, *saved = found if isinstance(found, tuple) else (found,)
    backward = getattr(module, f"{prefix}backward")
    backward(torch.empty_like(output), *arguments, *saved, needs)


def rows(case: dict[str, Any], tensors: int, parameters: int) -> list[torch.Tensor]:
    """Return tensors of 4096 rows, and parameters of a row."""
    shapes = [(4096, case["n"])] * tensors + [(case["n"],)] * parameters
    return [empty(*shape, dtype=DTYPES[case["dtype"]]) for shape in shapes]


def call_layer_norm(case: dict[str, Any]) -> None:
    x, weight, bias = rows(case, 1, 2)
    arguments = (x, (case["n"],), weight, bias, 1e-5, case["unbiased"])
    both(layer_norm, "", arguments, [True] * 3)


def call_rms_norm(case: dict[str, Any]) -> None:
    x, weight = rows(case, 1, 1)
    both(layer_norm, "rms_", (x, (case["n"],), weight, 1e-5), [True] * 2)


def call_dropout_add(case: dict[str, Any]) -> None:
    rms = case["op"] == "dropout_add_rms_norm"
    x, residual, *parameters = rows(case, 2, 1 if rms else 2)
    own = rows(case, 0, 1)[0] if case["input_bias"] else None
    seed, prefix = empty(1, dtype=torch.int64), "add_rms_" if rms else "add_"
    options = *parameters, 0.1, 1e-5, *(() if rms else (False,)), seed, own
    output, *saved = getattr(layer_norm, f"{prefix}forward")(x, residual, *options)
    gradients = torch.empty_like(output), torch.empty_like(output)
    needs = [True] * (2 + len(parameters)) + [own is not None]
    getattr(layer_norm, f"{prefix}backward")(*gradients, *options, *saved, needs)


def call_cross_entropy(case: dict[str, Any]) -> None:
    v, dtype = case["v"], DTYPES[case["dtype"]]
    logits, target = empty(4096, v, dtype=dtype), empty(4096, dtype=torch.int64)
    every, ahead = case["every"], case["ahead"]
    more = (empty(v, dtype=torch.float32), 1e-4, 30.0, 0.7) if every else (None, 0.0, None, 1.0)
    options = "mean", 0, 0.1, "kl", *more, every
    loss, entropy, lse, totals, gradient = cross_entropy.forward(logits, target, *options, ahead)
    saved = loss, entropy if every else None, logits, target, *options, lse, totals
    if ahead:
        cross_entropy.backward_in_place(*saved, gradient)
    else:
        cross_entropy.backward(*saved, [True])


def call_linear_kl_div(case: dict[str, Any]) -> None:
    v, dtype = case["v"], DTYPES[case["dtype"]]
    x, weight = empty(2048, 64, dtype=dtype), empty(v, 64, dtype=dtype)
    options = x, weight, None, None, None, "mean", False, 30.0, 0.7
    divergence.forward(x, weight, *options, [True, True, False])


def call_embed(case: dict[str, Any]) -> None:
    n, dtype = case["n"], DTYPES[case["dtype"]]
    weight, positional = empty(32768, n, dtype=dtype), empty(512, n, dtype=dtype)
    tokens = empty(8, 512, dtype=torch.int64)
    arguments = (tokens, weight, positional, 0.1, 2.0, 0, empty(1, dtype=torch.int64))
    both(embedding, "", arguments, [True, False])


def call_rotary_embedding(case: dict[str, Any]) -> None:
    """8 sequences of 4096 tokens, of 32 heads in 8 groups, as a projection lays them out."""
    dtype, d = DTYPES[case["dtype"]], case["d"]
    query, key = (empty(8, 4096, n, d, dtype=dtype).transpose(1, 2) for n in (32, 8))
    tables = (empty(4096, case["rotary"], dtype=torch.float32) for _ in range(2))
    norms = (empty(d, dtype=dtype) if case["norm"] else None for _ in range(2))
    options = *tables, case["interleaved"], *norms, 1e-6
    outputs = rotary.forward(query, key, *options)
    saved = (query, key) if case["norm"] else (None, None)
    rotary.backward(*map(torch.empty_like, outputs), *saved, *options, [True] * 4)


def call_gated(case: dict[str, Any]) -> None:
    n, dtype = case["n"], DTYPES[case["dtype"]]
    x, w, w_2 = (empty(*shape, dtype=dtype) for shape in ((512, 1024), (2 * n, 1024), (1024, n)))
    form = (1.0, None, 0.0) if case["op"] == "swiglu" else ()
    arguments = (x, w, None, w_2, None, 0.1, empty(1, dtype=torch.int64), *form)
    both(feed_forward, f"{case['op']}_", arguments, [True, True, False, True, False])


def call_gated_activation(case: dict[str, Any]) -> None:
    gate, value = (empty(512, case["n"], dtype=DTYPES[case["dtype"]]) for _ in range(2))
    form = (1.702, 7.0, 1.0) if case["limit"] else (1.0, None, 0.0)
    both(feed_forward, "activation_", (gate, value, "silu", *form), [True, True])


def call_feed_forward(case: dict[str, Any]) -> None:
    d, width, dtype = case["d"], 4 * case["d"], DTYPES[case["dtype"]]
    shapes = (8, 512, d), (width, d), (width,), (d, width), (d,)
    tensors = [empty(*shape, dtype=dtype) for shape in shapes]
    dropout = (0.1, empty((), dtype=torch.int64)) if case["dropout"] else (0.0, None)
    both(feed_forward, "", (*tensors, case["activation"], *dropout), [True] * 5)


def call_product(case: dict[str, Any]) -> None:
    """The products of a linear layer that do not sum over rows: y = x w^T + b, and dx = dy w."""
    d, dtype = case["d"], DTYPES[case["dtype"]]
    x, w, b = (empty(*shape, dtype=dtype) for shape in ((4096, d), (4 * d, d), (4 * d,)))
    products.product(products.product(x, w.t(), b), w)


CALLS = {
    "attention": call_attention,
    "decode": call_decode,
    "layer_norm": call_layer_norm,
    "rms_norm": call_rms_norm,
    "dropout_add_layer_norm": call_dropout_add,
    "dropout_add_rms_norm": call_dropout_add,
    "cross_entropy": call_cross_entropy,
    "linear_kl_div": call_linear_kl_div,
    "embed": call_embed,
    "rotary_embedding": call_rotary_embedding,
    "geglu": call_gated,
    "swiglu": call_gated,
    "gated_activation": call_gated_activation,
    "feed_forward": call_feed_forward,
    "product": call_product,
}


def choose_as_on(row: str) -> None:
    """Make the launchers choose as on a GPU of this row of the configuration tables."""
    for name, module in sys.modules.items():  # whichever launchers read it
        for fact, value in {**FACTS, "architecture": row}.items():
            if name.startswith("fastformer.kernels.") and hasattr(module, fact):
                setattr(module, fact, lambda device, value=value: value)
    forget()  # the plans are of the architecture before


def answer(recorder: Recorder, case: dict[str, Any]) -> dict[str, Any]:
    target, row, limit = TARGETS[case["arch"]]
    recorder.driver.target, recorder.records = target, []
    large.clear()
    recorder.loops, recorder.translate = case["arch"] in cost.CHIPS, case.get("translate", False)
    recorder.driver.compiles = not case.get("key", False)
    knobs.runtime.add_stages_inspection_hook = end_behind_ttgir if recorder.translate else None
    choose_as_on(row)
    started = os.times()
    try:
        choices = case.get("choices", {}).items()
        with tuned.forced({k: x if isinstance(x, str) else AttentionTiles(*x) for k, x in choices}):
            CALLS[case["op"]](case)
    except Exception:
        return dict(error=traceback.format_exc())
    if not recorder.driver.compiles:
        return dict(key=keys.digest((vars(target), [r["key"] for r in recorder.records])))
    seconds = sum(os.times()[:4]) - sum(started[:4])  # of this process and of ptxas, its child
    return dict(records=recorder.records, limit=limit, seconds=seconds)


def main() -> None:
    recorder = Recorder()
    replies = sys.stdout
    sys.stdout = sys.stderr  # what Triton prints is no reply
    for line in sys.stdin:
        print(json.dumps(answer(recorder, json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    main()
