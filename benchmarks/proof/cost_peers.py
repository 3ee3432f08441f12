"""Compiles the kernels of peers for sm_90, so that cost.py can weigh them beside ours:
FlexAttention, from the templates of the installed torch, and Liger's norms and cross-entropy and
FlashAttention-4 (cost_flash.py), if they are installed. It needs no GPU.

FlexAttention's blocks and warps are those that torch takes on an H100 unless it autotunes.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import torch
from torch._inductor.kernel import flex

from benchmarks.proof import cases, cost_flash

Records = list[dict[str, Any]]
LENGTH = 4096

# ---------------------------------------------------------------------------------- FlexAttention

_IMPORTS = "import triton\nimport triton.language as tl\n\n"
_LISTS = ("KV_NUM_BLKS", "KV_IDX", "FULL_KV_NUM_BLKS", "FULL_KV_IDX")  # of the block mask
_POINTERS = ("Q", "K", "V", "LSE", "MAX", *_LISTS, "OUT")
_BACKWARD_LISTS = (
    "KV_NUM_BLKS", "KV_IDX", "Q_NUM_BLKS", "Q_IDX",
    "FULL_KV_NUM_BLKS", "FULL_KV_IDX", "FULL_Q_NUM_BLKS", "FULL_Q_IDX",
)  # fmt: skip
_BACKWARD_POINTERS = ("Q", "K", "V", "LSE", "DELTA", "DO", "DQ", "DV", *_BACKWARD_LISTS, "DK")
_BLOCKS = 128  # queries and keys that an entry of the block mask stands for


def _flex_source(template: str, pointers: tuple[str, ...], d: int, **blocks: int) -> str:
    """Render a template, for [2, 4, LENGTH, d], with blocks that need no mask and blocks with a
    causal one. It writes what the last pointer points to.
    """
    sizes = {
        **dict.fromkeys(("Q", "K", "V", "DO", "DQ", "DV"), (2, 4, LENGTH, d)),
        **{name: (1, 1, LENGTH // _BLOCKS) for name in pointers if "NUM_BLKS" in name},
        **{name: (1, 1, *[LENGTH // _BLOCKS] * 2) for name in pointers if "IDX" in name},
    }
    constants = dict(
        PRESCALE_QK=False, ROWS_GUARANTEED_SAFE=False, BLOCKS_ARE_CONTIGUOUS=False,
        OUTPUT_LOGSUMEXP=True, OUTPUT_MAX=False, FLOAT32_PRECISION="'ieee'", IS_DIVISIBLE=True,
        SM_SCALE=d**-0.5, GQA_SHARED_HEADS=1, HAS_FULL_BLOCKS=True, USE_TMA=False, WRITE_DQ=True,
        QK_HEAD_DIM=d, QK_HEAD_DIM_ROUNDED=d, V_HEAD_DIM=d, V_HEAD_DIM_ROUNDED=d,
        SAFE_HEAD_DIM=True, INDEX_DTYPE="tl.int32",
        SPARSE_Q_BLOCK_SIZE=_BLOCKS, SPARSE_KV_BLOCK_SIZE=_BLOCKS, **blocks,
    )  # fmt: skip
    defines = "\n".join(f"{name} : tl.constexpr = {x}" for name, x in constants.items())

    def stride(name: str, index: int | None = None) -> str:
        shape = sizes[name]
        strides = [torch.Size(shape[i + 1 :]).numel() for i in range(len(shape))]
        return str(tuple(strides) if index is None else strides[index])

    def modification(subgraph_number: int, output_name: str | None, **names: Any) -> str:
        if output_name is None:  # gradients of what the scores are computed from
            return "pass"
        if "mask" in output_name:
            return f"{output_name} = (n) <= (m)"
        return f"{output_name} = " + names["grad_score_mod" if subgraph_number else "score"]

    def store_output(indices: tuple[str, ...], value: str, mask: str, **_: Any) -> str:
        z, h, m, n = indices
        out = pointers[-1]
        place = f"{out} + ((({z}) * 4 + {h}) * {LENGTH} + {m}) * {d} + {n}"
        return f"tl.store({place}, {value}.to({out}.dtype.element_ty), {mask})"

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    environment.filters["indent_except_first"] = _indented
    pieces = (template, "utilities", "common")
    text = "".join(flex.common.load_flex_template(name) + "\n" for name in pieces)
    arguments = ", ".join(f"arg_{name}" for name in pointers)
    head = defines + "".join(f"\n{name} = arg_{name}" for name in pointers)
    return _IMPORTS + environment.from_string(text).render(
        **constants,
        def_kernel=lambda *_: (
            f"@triton.jit\ndef {template}({arguments}):\n    {_indented(head, 1)}\n"
        ),
        gen_argdefs=lambda: arguments,
        gen_defines=lambda: defines,
        size=lambda name, index: str(sizes[name][index]),
        stride=stride,
        modification=modification,
        store_output=store_output,
    )


def _indented(text: str, levels: int) -> str:
    """Indent all lines but the first."""
    return text.replace("\n", "\n" + " " * 4 * levels)


def _compile_flex(
    template: str, pointers: tuple[str, ...], d: int, launch: tuple[int, int, int], **blocks: int
) -> None:
    """Compile a template. launch: programs of a head, stages and warps."""
    path = Path(tempfile.mkdtemp()) / f"{template}.py"
    path.write_text(_flex_source(template, pointers, d, **blocks))
    spec = importlib.util.spec_from_file_location(f"{template}_of_peers", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    dtypes = dict.fromkeys(("Q", "K", "V", "OUT", "DO", "DQ", "DK", "DV"), torch.bfloat16)
    dtypes |= dict.fromkeys(("LSE", "MAX", "DELTA"), torch.float32)
    given = [torch.empty(16, dtype=dtypes.get(name, torch.int32)) for name in pointers]
    programs, stages, warps = launch
    kernel = getattr(module, template)
    kernel.run(*given, grid=(programs, 2, 4), warmup=True, num_warps=warps, num_stages=stages)


def _flex(recorder: Any, d: int) -> None:
    rows, columns, stages, warps = {64: (128, 128, 3, 4), 128: (128, 64, 3, 8)}[d]
    blocks = dict(BLOCK_M=rows, BLOCK_N=columns)
    _compile_flex("flex_attention", _POINTERS, d, (LENGTH // rows, stages, warps), **blocks)
    recorder.records[-1]["blocks"] = dict(rows=rows, columns=columns)


def _flex_backward(recorder: Any, d: int) -> Records:
    """The gradients of keys and values, and those of queries, which are two halves of one kernel:
    a record of the loops of each. The first have four products of a tile, the others three.
    """
    rows, columns = 64, 128
    blocks = dict(BLOCK_M1=rows, BLOCK_N1=columns, BLOCK_M2=columns, BLOCK_N2=rows)
    programs = 2 * LENGTH // columns
    _compile_flex("flex_backwards", _BACKWARD_POINTERS, d, (programs, 3, 8), **blocks)
    whole = recorder.records.pop()
    loops = [loop for loop in whole["loops"] if loop["tensor"]]
    for name, products in (("dkdv", 4), ("dq", 3)):
        own = [i for i, n in enumerate(whole["products"]) if n == products * d * rows * columns]
        parts = {key: [whole[key][i] for i in own] for key in ("products", "outstanding")}
        recorder.records.append(
            whole
            | parts
            | dict(
                kernel=f"{whole['kernel']}, {name}",
                hash=f"{whole['hash']} {name}",
                loops=[loops[i] for i in own],
                blocks=dict(rows=rows, columns=columns),
            )
        )
    return recorder.records


# ------------------------------------------------------------------------------------------ Liger


def _liger(recorder: Any, op: str, n: int) -> Records:
    """The launches of an op of Liger, forward and backward, for rows of n elements."""
    from liger_kernel.ops import layer_norm, rms_norm

    x, weight, bias = (torch.ones(*shape, dtype=torch.bfloat16) for shape in ((8, n), (n,), (n,)))
    if op == "layer_norm":
        y, x, mean, rstd, _, _ = layer_norm.layer_norm_forward(x, weight, bias, 1e-5)
        layer_norm.layer_norm_backward(y, x, weight, bias, mean, rstd)
    else:
        y, x, rstd, *settings, mode = rms_norm.rms_norm_forward(x, weight, 1e-6, 0.0, "llama", True)
        rms_norm.rms_norm_backward(y, x, weight, rstd, 0.0, mode, *settings, False, True)
    return _of_rows(recorder, n)


def _liger_cross_entropy(recorder: Any, v: int) -> Records:
    """The launch that computes the loss and writes the gradient over the logits, and the one that
    scales it where the gradient of the loss is not 1. The loops of the first: zeros for a row that
    is ignored, the loss, the gradient.
    """
    from liger_kernel.ops import cross_entropy

    logits = torch.zeros(8, v, dtype=torch.bfloat16).requires_grad_()
    target = torch.zeros(8, dtype=torch.int64)
    cross_entropy.cross_entropy_forward(
        logits, target, None, -100, 0.0, 0.1, "mean", None, return_z_loss=False
    )
    cross_entropy.cross_entropy_backward(logits.detach(), torch.tensor(2.0))
    return _of_rows(recorder, min(v, cross_entropy.MAX_FUSED_SIZE))


def _of_rows(recorder: Any, n: int) -> Records:
    """Return the records of kernels that hold n elements of a row."""
    for record in recorder.records:  # as for 4096 rows: a backward has one program a multiprocessor
        record["blocks"] = dict(columns=n)
        record["programs"] = 132 if "backward" in record["kernel"] else 4096
    return recorder.records


def compiled() -> Iterator[tuple[str, Records]]:
    """Yield the name of each case, which is entered in cases.CASES, and its records."""
    from benchmarks.proof.compile_worker import TARGETS, Recorder

    recorder = Recorder()
    recorder.largest_argument = lambda args: 0  # type: ignore[method-assign]  # no gate asks
    recorder.driver.target, recorder.loops = TARGETS["sm_90"][0], True
    shared = dict(arch="sm_90", dtype="bf16", dropout=False, **cases.NOTHING)
    for d in (64, 128):
        name = f"sm_90 FlexAttention of torch {torch.__version__.split('+')[0]} bf16 D={d} causal"
        cases.CASES[name] = {**shared, "op": "attention", "d": d, "length": LENGTH}
        recorder.records = []
        _flex(recorder, d)
        yield name, _flex_backward(recorder, d)
    flash = cost_flash.version()
    if flash is None:
        print("flash-attn-4 is not installed: its kernels are left out", file=sys.stderr)
    else:
        for d, causal, records in cost_flash.compiled():
            name = f"sm_90 FlashAttention-4 {flash} bf16 D={d} {'causal' if causal else 'plain'}"
            cases.CASES[name] = {**shared, "op": "attention", "d": d, "length": LENGTH}
            yield name, records
    if importlib.util.find_spec("liger_kernel") is None:
        print("Liger is not installed: its kernels are left out", file=sys.stderr)
        return
    version = importlib.metadata.version("liger-kernel")
    for op, n in (("layer_norm", 4096), ("rms_norm", 4096)):
        name = f"sm_90 Liger {version} {op} bf16 N={n}"
        cases.CASES[name] = {**shared, "op": op, "d": n}
        recorder.records = []
        yield name, _liger(recorder, op, n)
    for v in (32768, 50257):
        name = f"sm_90 Liger {version} cross_entropy bf16 V={v}"
        cases.CASES[name] = {**shared, "op": "cross_entropy", "d": v}
        recorder.records = []
        yield name, _liger_cross_entropy(recorder, v)
