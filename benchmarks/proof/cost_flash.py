"""Compiles FlashAttention-4 (flash-attn-4, if it is installed) for sm_90, so that cost.py can weigh
its loops beside ours. It needs no GPU: the package compiles for tensors without data.

    python -m benchmarks.proof.cost_flash 64 causal forward FOLDER

compiles one kernel in this process, which the environment has to prepare (`ENVIRONMENT`), leaves
its machine code in a folder, and prints its tile. `compiled` starts such a process for each kernel;
each takes about 15 seconds.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks import ROOT

PACKAGE = "flash-attn-4"
# The compiler's target, the kernels that the interface chooses, and what else it asks a GPU for.
ENVIRONMENT = {
    "CUTE_DSL_ARCH": "sm_90a",
    "FLASH_ATTENTION_ARCH": "sm_90",
    "FLASH_ATTENTION_NUM_SMS": "132",
    "CUTE_DSL_KEEP_CUBIN": "1",
}
WAYS = ("forward", "backward", "backward, deterministic")
PRODUCTS = {"forward": 2, "backward": 5}  # of a tile


def version() -> str | None:
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def compiled() -> Iterator[tuple[int, bool, list[dict[str, Any]]]]:
    """Yield head dim, causality and the records of the kernels, one for each of WAYS."""
    for d in (64, 128):
        for causal in (False, True):
            yield d, causal, [_record(d, causal, way) for way in WAYS]


def _record(d: int, causal: bool, way: str) -> dict[str, Any]:
    """Return what `cost.entries` weighs of one kernel, in the form of compile_worker.py's records.

    The consumers, 4 warps each, run the same loops at the same time; a further 4 warps copy.
    """
    from benchmarks.proof import sass

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.proof.cost_flash", str(d)]
        command += ["causal" if causal else "plain", way, folder]
        environment = os.environ | ENVIRONMENT | {"CUTE_DSL_DUMP_DIR": folder}
        done = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{PACKAGE} does not compile: {done.stderr[-1000:]}")
        tile = json.loads(done.stdout.splitlines()[-1])
        kind = "fwd_sm90" if way == "forward" else "bwd_sm90"
        (cubin,) = (path for path in Path(folder).glob("*.cubin") if kind in path.name)
        code, registers = sass.disassemble(cubin.read_bytes()), _registers(cubin)
    consumers = tile.pop("consumers")
    warps = 4 * (consumers + 1)
    loops = [code.instructions[a : b + 1] for a, b in code.loops()]
    loops = [x for x in loops if any(i.name.startswith("HGMMA") for i in x)]
    product = PRODUCTS[way.partition(",")[0]] * d * tile["rows"] * tile["columns"]
    return dict(
        kernel=way.replace(", ", "_"),
        hash=f"{d} {causal} {way}",
        blocks=tile,
        warps=warps,
        registers=registers,
        shared=0,  # the registers leave room for one block anyhow
        programs=132,
        loops=[sass.together([x] * consumers, warps) for x in loops],
        whole=sass.count(code.instructions, warps),
        products=[product] * len(loops),
        outstanding=[None] * len(loops),  # its copies are waited for by barriers of memory
    )


def _registers(cubin: Path) -> int:
    """Return the registers of a thread at the launch."""
    from benchmarks.proof import sass

    command = [str(sass.NVDISASM.with_name("cuobjdump")), "-res-usage", str(cubin)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"REG:(\d+)", told)[-1])


def _compile(d: int, causal: bool, way: str) -> dict[str, int]:
    """Compile one kernel; return the tile that the interface chooses, and how many consumers."""
    import torch
    from flash_attn.cute import interface
    from torch._subclasses.fake_tensor import FakeTensorMode

    B, S, H = 4, 4096, 16
    # The semaphores of the deterministic backward are exported to the compiler, for which torch
    # asks the driver for these two.
    torch.cuda.current_device = lambda: 0
    torch.cuda.current_stream = lambda device=None: SimpleNamespace(cuda_stream=0)  # type: ignore

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="cuda")

    with FakeTensorMode():
        query, key, value, output, grad = (empty(B, S, H, d) for _ in range(5))
        if way == "forward":
            interface._flash_attn_fwd(query, key, value, causal=causal, return_lse=True)
            tile = interface._tile_size_fwd_sm90(d, d, causal, False)
            consumers = tile.m_block_size // 64
        else:
            lse = empty(B, H, S, dtype=torch.float32)
            given = query, key, value, output, grad, lse
            interface._flash_attn_bwd(*given, causal=causal, deterministic="," in way)
            tile = interface._tile_size_bwd_sm90(d, d, causal, False)
            consumers = tile.num_wg
    return dict(rows=tile.m_block_size, columns=tile.n_block_size, consumers=consumers)


if __name__ == "__main__":
    os.chdir(sys.argv[4])
    print(json.dumps(_compile(int(sys.argv[1]), sys.argv[2] == "causal", sys.argv[3])))
