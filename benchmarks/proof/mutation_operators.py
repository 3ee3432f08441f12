"""Mutation operators: the small changes of a Python source that may be bugs, read off its syntax
tree. A change replaces the text of one node; the rest of the file keeps its lines.

Left out by construction are changes that no run can show and those that only break the shape of a
tile, which any run shows. No run can show

- docstrings, annotations, messages, assertions (`raise AssertionError` too), hints to the compiler;
- the width of an integer in a kernel beyond what it holds: `.to(tl.int32)`, `.to(tl.uint32)` and
  whether the latter is a bitcast. (It shows in the machine code: benchmarks/proof/compile_gate.py.)
- a conversion that Triton's promotion repeats: `.to(ACC)` of a factor whose other factor has it, or
  of what is added to a sum that has that type; `tl.where(c, x, 0.0).to(x.dtype)`;
- placeholders: strides of a tensor that is not there, `(0, 0, 0, 0)`, and PLACEHOLDERS;
- one guard more in a kernel: a flag turned on; and what was done under a condition done always,
  where it is a load, a `tl.where`, or an index made wider (WIDE);
- the tiles themselves, where the interpreter has others: `a if INTERPRETED else b`;
- what a masked load of an elementwise kernel gives, where the same mask keeps it from being stored:
  no element meets another one there. (That the mask is there shows, as a read out of bounds.)

Elsewhere what a masked load gives becomes a NaN, as without `other` it may be anything; and so does
a number that `tl.where` chooses, as any finite one may do in the place of a NaN.

(For programs in general there are mutmut and cosmic-ray; they know neither masked loads nor
strides nor the width of an index, and plant into imported modules, where @triton.jit reads a file.)
"""

from __future__ import annotations

import ast
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

COMPARISONS: dict[type, tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
ARITHMETIC: dict[type, tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.RShift: (">>", "<<"),
    ast.LShift: ("<<", ">>"),
}
# Calls whose numbers are shapes and axes, or hints.
SHAPES = {
    "arange", "program_id", "reshape", "permute", "view", "zeros", "full", "multiple_of", "squeeze",
    "unsqueeze", "transpose", "sum", "max", "new_empty", "size", "dim", "unflatten", "flatten",
}  # fmt: skip
OPTIONS = {"strict", "num_warps", "num_stages", "warps", "stages", "stacklevel", "fmt", "bitcast"}
CHOICES = {"minimum", "maximum", "min", "max"}
PLACEHOLDERS = {"seed", "slope", "bias"}  # numbers that nobody looks at without what they stand for
HINTS = {"multiple_of", "max_contiguous", "assume"}
NARROW = {"tl.int32", "tl.uint32"}
ACROSS = {"sum", "max", "min", "dot", "reduce", "cumsum"}  # where elements of a tile meet
ACCUMULATOR = r"\b(?:ACC|\w+\.acc)\b"  # its type
KEYS = {"layout", "signature_of"}  # functions that return a key; and what is called so


@dataclass(frozen=True)
class Change:
    """`new` in the place of source[start:end], somewhere in a function."""

    file: str
    function: str
    line: int
    operator: str
    start: int
    end: int
    old: str
    new: str

    def apply(self, source: str) -> str:
        assert source[self.start : self.end] == self.old, f"{self.file} has changed"
        return source[: self.start] + self.new + source[self.end :]


class _Walk:
    """Collects the changes of one file."""

    def __init__(self, file: str, source: str) -> None:
        self.file, self.source = file, source
        self.starts = [0]
        for line in source.splitlines(True):
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[Change] = []
        self.function: list[str] = []
        self.parameters: list[str] = []
        self.compiled = (
            False  # in a kernel: its flags are guards, and what it loads it need not use
        )
        self.strides: dict[str, set[str]] = {}  # by group, those that the function reads
        self.wide: set[str] = set()  # names of what the function holds in the accumulator's type
        self.kept = ""  # the mask of all stores of an elementwise kernel
        self.others: set[int] = set()  # what a masked load gives, or tl.where chooses
        self.passed: set[int] = set()  # nodes of which a change shows in no run

    # ---------------------------------------------------------------------------------------- text

    def at(self, node: ast.AST) -> tuple[int, int]:
        def offset(line: int, column: int) -> int:
            start = self.starts[line - 1]
            text = self.source[start : self.starts[line]]
            return start + len(text.encode()[:column].decode())

        assert isinstance(node, (ast.expr, ast.stmt, ast.keyword))
        end = offset(node.end_lineno or 0, node.end_col_offset or 0)
        return offset(node.lineno, node.col_offset), end

    def text(self, node: ast.AST) -> str:
        start, end = self.at(node)
        return self.source[start:end]

    def add(self, operator: str, node: ast.expr | ast.stmt, new: str) -> None:
        start, end = self.at(node)
        old = self.source[start:end]
        if new != old:
            name = ".".join(self.function)
            self.found.append(Change(self.file, name, node.lineno, operator, start, end, old, new))

    def instead(self, operator: str, node: ast.expr, part: ast.expr) -> None:
        self.add(operator, node, f"({self.text(part)})")

    # ---------------------------------------------------------------------------------------- walk

    def walk(self, node: ast.AST, numbers: bool = True) -> None:
        """`numbers`: whether numbers here are values."""
        if isinstance(node, (ast.JoinedStr, ast.Assert, ast.Import, ast.ImportFrom)):
            return
        if isinstance(node, ast.Raise):
            if isinstance(node.exc, ast.Call) and _name(node.exc.func) == "AssertionError":
                return
            self.add("a refusal removed", node, "pass")
            return
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            self.scope(node)
            return
        if isinstance(node, ast.IfExp) and ast.unparse(node.test) == "INTERPRETED":
            return
        if isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self.walk(node.value, numbers)
            return
        method = getattr(self, type(node).__name__, None)
        if method is not None:
            method(node, numbers)
        if isinstance(node, ast.Call):
            name = _name(node.func)
            self.walk(node.func, numbers)
            for argument in node.args:
                self.walk(argument, numbers and name not in SHAPES)
            for keyword in node.keywords:
                if keyword.arg not in OPTIONS:
                    self.walk(keyword.value, numbers and name not in SHAPES)
            return
        if isinstance(node, ast.Subscript):
            self.walk(node.value, numbers)
            self.walk(node.slice, numbers and not isinstance(node.slice, ast.Tuple))
            return
        for child in ast.iter_child_nodes(node):
            self.walk(child, numbers)

    def scope(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        self.function.append(node.name)
        outer = self.parameters, self.compiled, self.kept, self.wide, self.strides
        self.compiled = self.compiled or any("jit" in self.text(d) for d in node.decorator_list)
        self.kept = self.one_mask(node) if self.compiled else ""
        self.strides = defaultdict(set)
        for part in ast.walk(node):
            if isinstance(part, ast.Attribute):
                self.strides[ast.unparse(part.value)].add(part.attr)
        self.wide = {
            ast.unparse(part.targets[0])
            for part in ast.walk(node)
            if isinstance(part, ast.Assign) and re.search(ACCUMULATOR, ast.unparse(part.value))
        }
        if isinstance(node, ast.FunctionDef):
            self.parameters = [a.arg for a in (*node.args.args, *node.args.kwonlyargs)]
            for default in (*node.args.defaults, *node.args.kw_defaults):
                if default is not None:
                    self.walk(default)
        for statement in node.body:
            if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                self.walk(statement)
        self.parameters, self.compiled, self.kept, self.wide, self.strides = outer
        self.function.pop()

    def one_mask(self, function: ast.AST) -> str:
        """That of all stores of a function in which no element of a tile meets another; or ""."""
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        if any(_name(call.func) in ACROSS for call in calls):
            return ""
        masks = {self.option(call, "mask") for call in calls if _name(call.func) == "store"}
        return masks.pop() if len(masks) == 1 else ""

    def option(self, call: ast.Call, name: str) -> str:
        return "".join(self.text(k.value) for k in call.keywords if k.arg == name)

    # ----------------------------------------------------------------------------------- operators

    def Constant(self, node: ast.Constant, numbers: bool) -> None:
        value = node.value
        if id(node) in self.passed:
            return
        if isinstance(value, bool) and (value or not self.compiled):  # else one guard more
            self.add("a flag flipped", node, str(not value))
        elif isinstance(value, int) and not isinstance(value, bool) and numbers:
            self.add("a number plus 1", node, str(value + 1))
            self.add("a number minus 1", node, str(value - 1) if value else "(-1)")
        elif isinstance(value, float) and numbers:
            self.factor(node, repr(value * 1.05 if value else 1.0))

    def factor(self, node: ast.expr, new: str) -> None:
        new = 'float("nan")' if self.compiled and id(node) in self.others else new
        self.add("another factor", node, new)

    def Compare(self, node: ast.Compare, numbers: bool) -> None:
        if len(node.ops) == 1:
            old, new = COMPARISONS[type(node.ops[0])]
            self.operator("a comparison", node, node.left, node.comparators[0], old, new)

    def operator(
        self, name: str, node: ast.expr, left: ast.expr, right: ast.expr, old: str, new: str
    ) -> None:
        start, _ = self.at(node)
        _, end = self.at(node)
        first, last = self.at(left)[1], self.at(right)[0]
        between = self.source[first:last]
        if between.count(old) == 1:
            text = self.source[start:first] + between.replace(old, new) + self.source[last:end]
            self.add(name, node, text)

    def BinOp(self, node: ast.BinOp, numbers: bool) -> None:
        kind = type(node.op)
        if _wide(node.left) and _wide(node.right):
            self.passed.update((id(node.left), id(node.right)))
        if kind in ARITHMETIC:
            self.operator("arithmetic", node, node.left, node.right, *ARITHMETIC[kind])
        guard = kind in (ast.BitAnd, ast.BitOr)
        name = "a guard dropped" if guard else "a term dropped"
        if kind in ARITHMETIC:
            self.instead(name, node, node.left)
        if kind in (ast.Add, ast.Mult, ast.BitAnd, ast.BitOr):
            self.instead(name, node, node.right)

    def BoolOp(self, node: ast.BoolOp, numbers: bool) -> None:
        word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        parts = [f"({self.text(value)})" for value in node.values]
        self.add("a comparison", node, "(" + f" {other} ".join(parts) + ")")
        for n in range(len(parts)):
            rest = f" {word} ".join(parts[:n] + parts[n + 1 :])
            self.add("a condition dropped", node, f"({rest})")

    def UnaryOp(self, node: ast.UnaryOp, numbers: bool) -> None:
        if isinstance(node.op, ast.Not):
            self.instead("a condition dropped", node, node.operand)
        elif isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
            self.instead("arithmetic", node, node.operand)

    def If(self, node: ast.If, numbers: bool) -> None:
        spare = self.compiled and not node.orelse and all(map(_guards, node.body))
        for word in ("False",) if spare else ("True", "False"):
            self.add("a condition dropped", node.test, word)

    def IfExp(self, node: ast.IfExp, numbers: bool) -> None:
        self.instead("a condition dropped", node, node.body)
        self.instead("a condition dropped", node, node.orelse)

    def Call(self, node: ast.Call, numbers: bool) -> None:
        name, arguments = _name(node.func), node.args
        if name == "store":  # it converts by itself
            self.passed.update(map(id, arguments))
        if name == "load" and self.kept and self.option(node, "mask") == self.kept:
            self.passed.update(id(k.value) for k in node.keywords if k.arg == "other")
        elif name == "load":
            self.others.update(id(k.value) for k in node.keywords if k.arg == "other")
        if isinstance(node.func, ast.Attribute) and id(node) not in self.passed:
            if name == "to" and "int64" in self.text(node):
                self.instead("int64 dropped", node, node.func.value)
            elif name in ("to", "contiguous", "abs") and not (_narrow(node) or _again(node)):
                self.instead("a conversion dropped", node, node.func.value)
        if name == "unit_stride":
            self.instead("a conversion dropped", node, arguments[0])
        if name in CHOICES and len(arguments) == 2:
            for argument in arguments:
                self.instead("a guard dropped", node, argument)
        if name == "where" and len(arguments) == 3:
            self.others.update(map(id, arguments[1:]))
            for argument in arguments[1:]:
                self.instead("a guard dropped", node, argument)
        if self.text(node) == 'float("-inf")' and id(node) not in self.passed:
            self.factor(node, "0.0")
        texts = [self.text(argument) for argument in arguments]
        keywords = [self.text(keyword) for keyword in node.keywords]
        function = self.text(node.func)
        masked = [k.arg in ("mask", "other") for k in node.keywords]
        if any(masked):
            rest = [text for text, drop in zip(keywords, masked) if not drop]
            self.add("a mask removed", node, f"{function}({', '.join(texts + rest)})")
        for n, (a, b) in enumerate(pairwise(arguments)):
            if _alike(a, b) and name not in CHOICES:
                swapped = [*texts[:n], texts[n + 1], texts[n], *texts[n + 2 :], *keywords]
                self.add("arguments swapped", node, f"{function}({', '.join(swapped)})")

    def Name(self, node: ast.Name, numbers: bool) -> None:
        """Another stride of the same tensor."""
        name = node.id
        if isinstance(node.ctx, ast.Load) and name.startswith("s_") and name in self.parameters:
            for other in self.parameters:
                if other != name and other[:-1] == name[:-1]:
                    self.add("a stride swapped", node, other)

    def Attribute(self, node: ast.Attribute, numbers: bool) -> None:
        """Puts another stride in its place, of the same tensor where each tensor has several."""
        group, _, name = ast.unparse(node).rpartition(".")
        if isinstance(node.ctx, ast.Load) and group.endswith("strides"):
            for other in sorted(self.strides[group] - {name}):
                if other.rpartition("_")[0] == name.rpartition("_")[0]:
                    self.add("a stride swapped", node, f"{group}.{other}")

    def Tuple(self, node: ast.Tuple, numbers: bool) -> None:
        if len(node.elts) > 1 and all(ast.unparse(part) == "0" for part in node.elts):
            self.passed.update(map(id, node.elts))
        if self.function and self.function[-1] in KEYS and isinstance(node.ctx, ast.Load):
            self.key(node)

    def key(self, node: ast.Tuple) -> None:
        parts = [self.text(part) for part in node.elts]
        for n in range(len(parts)):
            rest = ", ".join(parts[:n] + parts[n + 1 :])
            self.add("a field left out of a key", node, f"({rest},)" if rest else "()")

    def Assign(self, node: ast.Assign, numbers: bool) -> None:
        (target, *_), value = node.targets, node.value
        if isinstance(target, ast.Name):
            if target.id in PLACEHOLDERS and isinstance(value, ast.Constant):
                self.passed.add(id(value))
            if target.id in ("signature", "key") and isinstance(value, ast.Tuple):
                self.key(value)
            again = {n.id for n in ast.walk(value) if isinstance(n, ast.Name)}
            if target.id in again and not _hint(value):
                self.add("a statement removed", node, "pass")

    def AugAssign(self, node: ast.AugAssign, numbers: bool) -> None:
        self.add("a statement removed", node, "pass")
        value = node.value.value if isinstance(node.value, ast.Subscript) else node.value
        if _wide(value) and ast.unparse(node.target) in self.wide:
            self.passed.add(id(value))
        symbol = ARITHMETIC[type(node.op)][0]
        text = self.text(node).replace(f" {symbol}= ", " = ", 1)
        self.add("a term dropped", node, text)

    def Expr(self, node: ast.Expr, numbers: bool) -> None:
        if isinstance(node.value, ast.Call):
            self.add("a statement removed", node, "pass")

    def Return(self, node: ast.Return, numbers: bool) -> None:
        if node.value is None:
            self.add("a statement removed", node, "pass")


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _guards(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Assign):
        return False
    calls = [node for node in ast.walk(statement.value) if isinstance(node, ast.Call)]
    wider = calls and all(ast.unparse(call).endswith(".to(tl.int64)") for call in calls)
    return bool(wider) or any(_name(call.func) in ("load", "where") for call in calls)


def _hint(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and _name(value.func) in HINTS


def _wide(value: ast.expr) -> bool:
    return re.search(rf"\.to\({ACCUMULATOR}\)$", ast.unparse(value)) is not None


def _again(conversion: ast.Call) -> bool:
    """Of tl.where(c, x, a number) to the type of x, which it has."""
    chosen = conversion.func.value if isinstance(conversion.func, ast.Attribute) else None
    if not (isinstance(chosen, ast.Call) and _name(chosen.func) == "where"):
        return False
    types = [f"{ast.unparse(chosen.args[1])}.dtype"]
    number = isinstance(chosen.args[2], ast.Constant)
    return number and [ast.unparse(argument) for argument in conversion.args] == types


def _narrow(conversion: ast.Call) -> bool:
    return any(ast.unparse(argument) in NARROW for argument in conversion.args)


def _alike(a: ast.expr, b: ast.expr) -> bool:
    """Two names that a slip exchanges: of strides, of tensors or numbers, or of constants; or two
    fields of a group.
    """
    if isinstance(a, ast.Attribute) and isinstance(b, ast.Attribute):
        return ast.unparse(a.value) == ast.unparse(b.value)
    if not (isinstance(a, ast.Name) and isinstance(b, ast.Name)):
        return False
    return (a.id.startswith("s_"), a.id.isupper()) == (b.id.startswith("s_"), b.id.isupper())


def changes(file: str, source: str) -> list[Change]:
    """All of one file, in its order."""
    walk = _Walk(file, source)
    for statement in ast.parse(source).body:
        # Tables of configurations have no effect on a result.
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            walk.walk(statement)
    return walk.found


def draw(candidates: Sequence[Change], n: int, seed: int) -> list[Change]:
    """n of them without replacement, as many of each operator as there are, each as likely."""
    shuffled = random.Random(seed).sample(candidates, len(candidates))
    kinds: dict[str, list[Change]] = defaultdict(list)
    for change in shuffled:
        kinds[change.operator].append(change)
    return [change for _, change in zip(range(n), _in_turn(list(kinds.values())))]


def draw_by_weight(
    candidates: Sequence[Change], weights: dict[str, int], n: int, seed: int
) -> list[Change]:
    """n of them, from each file a share by its weight, and there as `draw` has it."""
    total, chosen, before = sum(weights.values()), [], 0
    for place, (file, weight) in enumerate(weights.items()):
        share = (before + weight) * n // total - before * n // total
        before += weight
        mine = [change for change in candidates if change.file == file]
        chosen += draw(mine, share, seed + place)
    return chosen


def _in_turn(piles: list[list[Change]]) -> Iterator[Change]:
    while piles:
        for pile in piles:
            yield pile.pop()
        piles = [pile for pile in piles if pile]
