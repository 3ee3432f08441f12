"""Reads the machine code (SASS) of compiled kernels for NVIDIA GPUs: instructions and loops.

It uses `nvdisasm` of Triton's wheel and needs no GPU.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import triton

NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);")
SHORTEST_LOOP = 8  # instructions; a shorter one waits for a barrier
_LABEL = re.compile(r"^\s*(\.L\w+):")
_TARGET = re.compile(r"`\((\.L\w+)\)")

# Instructions that are counted by the first word of their names.
UNITS = {"tensor": ("HGMMA", "HMMA", "UTCHMMA"), "local": ("LDL", "STL")}
_COPIES = {"LDGSTS": "loaded", "LDG": "loaded", "STG": "stored"}


class Instruction(NamedTuple):
    name: str  # with its modifiers: "HGMMA.64x64x16.F32.BF16"
    operands: str


class Code(NamedTuple):
    """The instructions of a kernel and where its labels stand among them."""

    instructions: list[Instruction]
    labels: dict[str, int]

    def loops(self) -> list[tuple[int, int]]:
        """Return the first and last instruction of every innermost loop that does more than wait.

        The code after the last EXIT waits for barriers or traps, and is ignored.
        """
        ends: dict[int, int] = {}
        names = [name for name, _ in self.instructions]
        last = len(names) - names[::-1].index("EXIT")
        for i, (name, operands) in enumerate(self.instructions[:last]):
            target = _TARGET.search(operands) if name.startswith("BRA") else None
            if target and self.labels.get(target[1], i + 1) <= i:
                start = self.labels[target[1]]
                ends[start] = max(i, ends.get(start, i))
        found = [(a, b) for a, b in ends.items() if b - a >= SHORTEST_LOOP]
        inner = [(a, b) for a, b in found if not any((a, b) != o and a <= o[0] <= b for o in found)]
        return sorted(inner)


def disassemble(cubin: bytes) -> Code:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(NVDISASM), "-c", "-ndf", file.name]  # without an analysis of data flow
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return parse(text)


def parse(text: str) -> Code:
    code = Code([], {})
    for line in text.splitlines():
        if label := _LABEL.match(line):
            code.labels[label[1]] = len(code.instructions)
        elif found := _INSTRUCTION.match(line):
            code.instructions.append(Instruction(found[1], found[2]))
    return code


def count(instructions: list[Instruction], warps: int) -> dict[str, Any]:
    """Count what one pass over the instructions needs, for a block of that many warps.

    issue        instructions a warp
    <unit>       those of them that `UNITS` names
    exponential  those that are exponentials
    product      multiply-adds of the block's tensor instructions; 0 where the code does not say,
                 for the fifth generation of tensor cores
    loaded, stored   bytes of global memory
    in_flight    bytes of the loads that are under way at a time: those of one pass, and, of its
                 asynchronous copies, those of the passes that they are ahead
    wgmma        asynchronous tensor instructions of sm_90
    beside       exponentials that are issued while a wgmma of the same warps is under way
    """
    names = [instruction.name.split(".")[0] for instruction in instructions]
    counts: dict[str, Any] = {unit: sum(map(names.count, own)) for unit, own in UNITS.items()}
    counts["issue"] = len(names) - names.count("NOP")
    counts["exponential"] = sum(i.name.startswith("MUFU.EX2") for i in instructions)
    counts |= dict.fromkeys(("product", "loaded", "stored"), 0)
    copied, waits = 0, []
    for name, operands in instructions:
        if name.startswith("HGMMA"):
            m, n, k = map(int, re.findall(r"\d+", name.split(".")[1]))
            counts["product"] += m * n * k * warps // 4
        elif name.startswith("HMMA"):  # 16816 is 16 x 8 x 16
            shape = re.fullmatch(r"168(\d+)", name.split(".")[1])
            assert shape, name
            counts["product"] += 16 * 8 * int(shape[1]) * warps
        elif name.startswith("LDGSTS"):
            copied += _bytes(name) * 32 * warps
        elif name == "DEPBAR.LE":  # as many groups of copies may be under way behind it
            waits.append(int(operands.split(",")[1], 16))
        if kind := _COPIES.get(name.split(".")[0]):
            counts[kind] += _bytes(name) * 32 * warps
    groups = names.count("LDGDEPBAR")
    ahead = min(waits, default=0) // groups if groups else 0
    counts["in_flight"] = counts["loaded"] + ahead * copied
    counts["wgmma"] = names.count("HGMMA")
    counts["beside"] = beside_products(instructions)
    return counts


def together(loops: list[list[Instruction]], warps: int) -> dict[str, Any]:
    """Count what one pass needs over loops that run at the same time, each in 4 warps of its own,
    in a block of that many warps: what `count` gives for a warp is the mean over all warps.
    """
    counts = [count(loop, 4) for loop in loops]
    of_a_block = ("product", "loaded", "stored", "in_flight")
    return {
        unit: sum(c[unit] for c in counts) * (1 if unit in of_a_block else 4 / warps)
        for unit in counts[0]
    }


def beside_loops(code: Code, warps: int) -> dict[str, int]:
    """Count what a kernel of that many warps issues beside its loops of products, if it has any.

    start   from the entry to the first product, by all warps of a scheduler
    end     behind the last loop of products
    copy    for a tile, by the warp that copies by TMA
    mask    for a tile, by the warp that sets masked keys to zero, or, for dK and dV, loads the
            statistics of rows, all branches taken

    Where warps are specialised, `start` and `end` are those of the first group of four warps, to
    which the first branch of the kernel jumps.
    """
    names = [i.name.split(".")[0] for i in code.instructions]
    loops = [(a, b, set(names[a : b + 1])) for a, b in code.loops()]
    branch = first = 0
    if "USETMAXREG" in names:
        branch = names.index("BRA")
        target = _TARGET.search(code.instructions[branch].operands)
        assert target
        first, warps = code.labels[target[1]], 4
    product = [i for i, name in enumerate(names) if i >= first and name in ("HGMMA", "HMMA")]
    if not product:
        return {}
    end = max([b for _, b, found in loops if "HGMMA" in found or "HMMA" in found], default=0)
    last = len(names) - names[::-1].index("EXIT")
    lengths = {"start": branch + product[0] - first, "end": last - end - 1}
    lengths = {part: n * warps // 4 for part, n in lengths.items()}
    for a, b, found in loops:
        own = [code.instructions[i] for i in range(a) if names[i] == "USETMAXREG"]
        if own and int(own[-1].operands.split()[-1], 16) < 64:  # registers of a warp that helps
            part = "copy" if "UTMALDG" in found else "mask"
            lengths[part] = max(lengths.get(part, 0), b + 1 - a)
    return lengths


def beside_products(loop: list[Instruction]) -> int:
    """Count the exponentials of a loop that are issued while a wgmma may be under way, one of the
    pass before included.

    A group of wgmma ends with the one that has gsb0. WARPGROUP.DEPBAR waits until as many groups
    are left as it says.
    """
    groups, is_open, found = 0, False, 0  # groups that are closed and not waited for
    for turn in range(2):
        for name, operands in loop:
            if name.startswith("HGMMA"):
                is_open = "gsb0" not in operands
                groups += not is_open
            elif name.startswith("WARPGROUP.DEPBAR"):
                groups = min(groups, int(operands.split(",")[1], 16))
            elif turn and name.startswith("MUFU.EX2") and (groups or is_open):
                found += 1
    return found


def _bytes(name: str) -> int:
    """Return the bytes that a thread copies by an instruction: LDG.E.128, STG.E.U8."""
    sizes = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
    return next((sizes[word] for word in name.split(".") if word in sizes), 4)


def products(ttir: str) -> list[int]:
    """Return the multiply-adds of one iteration, for each loop that multiplies matrices."""
    return [sum(found) for found in _by_loop(ttir, _product) if found]


def digest(ttgir: str) -> str:
    """Return a digest of a kernel in Triton's GPU IR, whatever file and line it is from."""
    code = "\n".join(line for line in ttgir.splitlines() if not line.startswith("#loc"))
    return hashlib.sha256(re.sub(r" loc\(#loc\d*\)", "", code).encode()).hexdigest()[:16]


def outstanding(ttgir: str) -> list[int | None]:
    """Return how many groups of copies may be in flight where a loop waits for one, for each loop
    that multiplies matrices. 0 means that it waits for all, None that it copies nothing ahead.
    Where warps are specialised, those that copy are ahead by all buffers of an operand but one.
    """
    if "ttg.warp_specialize" in ttgir:
        buffers = re.findall(r"ttg\.local_alloc : .*memdesc<(\d+)x\d+x\d+x", ttgir)
        return [min(int(n) for n in buffers if n != "1") - 1]
    return [
        min((n for kind, n in found if kind == "wait"), default=None)
        for found in _by_loop(ttgir, _wait_or_product)
        if any(kind == "product" for kind, _ in found)
    ]


def _product(line: str) -> int | None:
    if " tt.dot " not in line:
        return None
    (m, k), (_, n), _ = re.findall(r"tensor<(\d+)x(\d+)x", line)[-3:]
    return int(m) * int(n) * int(k)


def _wait_or_product(line: str) -> tuple[str, int] | None:
    if wait := re.search(r"ttg\.async_wait .*num = (\d+)", line):
        return "wait", int(wait[1])
    if re.search(r"\b(tt\.dot|ttng\.warp_group_dot|ttng\.tc_gen5_mma) ", line):
        return "product", 1
    return None


def _by_loop(text: str, read: Callable[[str], Any]) -> list[list[Any]]:
    """Collect what `read` finds in each scf.for of MLIR text, without the loops inside it."""
    found: list[list[Any]] = []
    inside: list[tuple[int, list[Any]]] = []  # indent and findings of the loops that are open
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        while inside and line.strip() and indent <= inside[-1][0]:
            inside.pop()
        if " scf.for " in line:
            inside.append((indent, []))
            found.append(inside[-1][1])
        elif inside and (value := read(line)) is not None:
            inside[-1][1].append(value)
    return found
