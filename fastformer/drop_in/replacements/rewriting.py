"""Rewrites the source of a method, so that chains of its submodules run on the ops.

    hidden = self.act(self.fc1(hidden))      hidden = self._run_chain(
    hidden = self.fc2(hidden)                    hidden, self.fc1, self.act, self.fc2)

    hidden = self.dropout(hidden)            _sum_norm = self._add_chain(
    hidden = residual + hidden                   self.norm, residual, hidden, self.dropout)
    residual = hidden                        residual = hidden = _sum_norm[1]
    hidden = self.norm(hidden)               hidden = self._norm_of(self.norm, hidden, _sum_norm)

The methods on the right (chains.py) look at the submodules in each call. They run an op where the
submodules compute the same, and else the submodules one by one. So the new code is right whatever
the submodules are, and this file reads only syntax.

A link is a call of one argument that can be part of a chain: self.fc1(x), F.gelu(x), F.dropout(x,
p, training), or a cast of x to the dtype of the next submodule. The path of self.fc1 is "fc1".
"""

from __future__ import annotations
import __future__

import ast
import copy
import dis
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

ACTIVATIONS = F.relu, torch.relu, F.gelu, F.silu  # the functions that may be links

# Where these occur, a name may be read that the code does not show.
_OPAQUE = (
    ast.Try, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.NamedExpr,
    ast.Global, ast.Nonlocal, ast.Delete, ast.Yield, ast.YieldFrom, ast.Await, ast.comprehension,
)  # fmt: skip
_BLOCKS = "body", "orelse"

_EXITS = ast.Return, ast.Break, ast.Continue


@dataclass
class Rewritten:
    """What the source of a method holds.

    function: the method on the ops, or None if it holds no chain and no pair. after: of a method of
    two arguments, the same with links before them that are applied to the first argument, before
    the submodule `first` is; None if the method is another. links: the paths of the submodules if
    the method returns a chain of its only argument, else (). norms: the path of each submodule that
    a sum is given to, and the links within the sum, each a path, a function, or None for a cast.
    chains: the links of each chain.
    pairs: the paths of (outer, inner) of each call self.outer(self.inner(x), y).
    """

    function: Callable[..., Any] | None = None
    after: Callable[..., Any] | None = None
    first: str = ""
    links: tuple[str, ...] = ()
    norms: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    chains: list[tuple[Any, ...]] = field(default_factory=list)
    pairs: list[tuple[str, str]] = field(default_factory=list)


@functools.cache
def rewritten(method: FunctionType) -> Rewritten | None:
    """Rewrite a method. Return None if its source cannot be read, or is too involved."""
    if method.__code__.co_name == "forward_with_checkpointing":  # it wraps each subclass's, too
        method = inspect.unwrap(method)
    if hasattr(method, "__wrapped__") or method.__code__.co_freevars:
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, TypeError, SyntaxError):
        return None
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef) or not definition.args.args:
        return None
    if any(isinstance(x, _OPAQUE) for y in definition.body for x in ast.walk(y)):
        return None
    if _reads(_code(tree, method)) != _reads(method.__code__):
        return None  # the file has changed, or something else has changed the code
    ast.increment_lineno(tree, method.__code__.co_firstlineno - 1)
    return _Rewriter(method, tree, definition).result()


def methods_of(original: type) -> dict[str, FunctionType]:
    """Return, by name, the forward of a class and the methods of the class that it mentions."""
    forward = getattr(original, "forward", None)
    names = inspect.unwrap(forward).__code__.co_names if isinstance(forward, FunctionType) else ()
    found = {name: inspect.getattr_static(original, name, None) for name in ("forward", *names)}
    return {name: method for name, method in found.items() if isinstance(method, FunctionType)}


def _reads(code: CodeType) -> list[Any]:
    """Return what the instructions of a method read, write and compute, in order."""
    kinds = "LOAD", "STORE", "BINARY", "COMPARE", "IS", "CONTAINS"
    found = dis.get_instructions(code)
    return [x.argval for x in found if x.opname.partition("_")[0] in kinds]


def _code(tree: ast.Module, method: FunctionType) -> CodeType:
    """Compile a module that defines the method, and return the code of the method."""
    flags = method.__code__.co_flags & __future__.annotations.compiler_flag
    file = method.__code__.co_filename
    module = compile(ast.fix_missing_locations(tree), file, "exec", flags, dont_inherit=True)
    codes = [x for x in module.co_consts if isinstance(x, CodeType)]
    return next(x for x in codes if x.co_name == tree.body[0].name)  # type: ignore[attr-defined]


class _Link(NamedTuple):
    call: ast.Call
    expression: ast.expr  # what the new methods are given for it
    what: Any  # the path of a submodule, a function, or None for a cast


class _Rewriter(ast.NodeTransformer):
    """Rewrites one method: first `_joined`, then `_on_the_ops`, whose expressions it visits."""

    def __init__(self, method: FunctionType, tree: ast.Module, definition: ast.FunctionDef) -> None:
        self._method, self._tree, self._definition = method, tree, definition
        self._names = [x.arg for x in definition.args.args]
        self._found = Rewritten()
        self._sums: dict[str, str] = {}  # path of a norm -> the variable of the sum that it reads

    def result(self) -> Rewritten:
        definition, found = self._definition, self._found
        if ast.get_docstring(definition) is not None:
            del definition.body[0]
        if not definition.body:
            return found
        body = self._joined(definition.body)
        begins = copy.deepcopy(body)
        first = body[0]
        if len(self._names) == 2 and isinstance(first, ast.Return) and first.value is not None:
            base, links = self._chain(first.value)
            if _is_name(base, self._names[1]) and all(isinstance(x.what, str) for x in links):
                found.links = tuple(x.what for x in links)
        definition.body = self._on_the_ops(body, [])
        if found.norms or found.chains or found.pairs:
            found.function = self._made()
        if len(self._names) == 3 and self._takes_links(begins):
            definition.body = self._on_the_ops(begins, [])
            definition.args.args.insert(1, ast.arg("_before"))
            found.after = self._made()
        return found

    def _made(self) -> Callable[..., Any]:
        """Compile the definition as it is now."""
        start = ast.parse("".join(f"{name} = None\n" for name in self._sums.values())).body
        for node in (y for x in start for y in ast.walk(x)):
            ast.copy_location(node, self._definition)
        self._definition.body[:0] = start
        own = self._method
        code = _code(self._tree, own)
        made = FunctionType(code, own.__globals__, own.__name__, own.__defaults__)
        made.__kwdefaults__ = own.__kwdefaults__
        return functools.update_wrapper(made, own)

    def _takes_links(self, body: list[ast.stmt]) -> bool:
        """Let the first submodule, which alone reads the first argument, run after `_before`."""
        uses = [x for y in body for x in ast.walk(y) if _is_name(x, self._names[1])]
        calls = [x for x in ast.walk(body[0]) if isinstance(x, ast.Call) and x.args[:1] == uses]
        link = self._link(calls[0]) if len(calls) == 1 else None
        if link is None or not isinstance(link.what, str) or isinstance(body[0], ast.If):
            return False
        before = ast.Starred(ast.Name("_before", ast.Load()), ast.Load())
        calls[0].args = [calls[0].args[0], before, link.expression]
        calls[0].func = self._own("_run_chain")
        self._found.first = link.what
        return True

    # ------------------------------------------------------------- statements become expressions

    def _joined(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """Put each link and each sum into the statement after it, if nothing else reads it."""
        out: list[ast.stmt] = []
        for i, statement in enumerate(body):
            for name in _BLOCKS:
                if isinstance(block := getattr(statement, name, None), list):
                    setattr(statement, name, self._joined(block))
            statement = self._as_cast(statement, *body[i + 1 : i + 2]) or statement
            while out and self._join(out[-1], statement):
                out.pop()
            out.append(statement)
        return out

    def _join(self, first: ast.stmt, second: ast.stmt) -> bool:
        name, target = _target(first), _target(second)
        if name is None or not (target or isinstance(second, ast.Return)):
            return False
        value = first.value  # type: ignore[attr-defined]
        if not _is_sum(value) and self._link(value) is None:
            return False
        nodes = list(_walk(second))
        uses = [x for x in nodes if _is_name(x, name)]
        calls = [x for x in nodes if isinstance(x, ast.Call)]
        if len(uses) != 1 or any(uses[0] not in ast.walk(x) for x in calls):
            return False
        if target not in (None, name):
            loads = [x for x in _walk(self._definition) if _is_name(x, name)]
            if len(loads) != 1:
                return False
        _Substitute(uses[0], value).visit(second)
        return True

    def _as_cast(self, statement: ast.stmt, following: ast.stmt | None = None) -> ast.stmt | None:
        """Return `if test: x = x.to(self.fc2.weight.dtype)` before self.fc2(x) as a link of x."""
        if not isinstance(statement, ast.If) or statement.orelse or len(statement.body) != 1:
            return None
        name, value = _target(statement.body[0]), getattr(following, "value", None)
        link = None if value is None else self._link(value)
        if name is None or link is None or not _is_name(link.call.args[0], name):
            return None
        value = statement.body[0].value  # type: ignore[attr-defined]
        if ast.unparse(value) != f"{name}.to({ast.unparse(link.expression)}.weight.dtype)":
            return None
        made = ast.parse(f"{name} = (lambda {name}: {name})({name})").body[0]
        assert isinstance(made, ast.Assign) and isinstance(made.value, ast.Call)
        function = made.value.func
        assert isinstance(function, ast.Lambda)
        function.body = ast.IfExp(statement.test, value, function.body)
        for node in ast.walk(made):
            ast.copy_location(node, statement)
        return made

    # ------------------------------------------------------------------------------------ links

    def _link(self, node: ast.AST) -> _Link | None:
        if not isinstance(node, ast.Call) or not node.args or isinstance(node.args[0], ast.Starred):
            return None
        if _is_cast(node):
            return _Link(node, ast.Tuple([node.func], ast.Load()), None)
        names = _dotted(node.func)
        if names[:1] == self._names[:1] and len(names) > 1:
            alone = len(node.args) == 1 and not node.keywords
            return _Link(node, node.func, ".".join(names[1:])) if alone else None
        function = self._global(names)
        if function is F.dropout:
            given = dict(zip(("p", "training"), node.args[1:]))
            given |= {x.arg or "**": x.value for x in node.keywords}
            if given.keys() <= {"p", "training"}:
                p, training = given.get("p", ast.Constant(0.5)), given.get("training")
                test = ast.Constant(True) if training is None else training
                return _Link(node, ast.IfExp(test, p, ast.Constant(0.0)), F.dropout)
        elif function in ACTIVATIONS and len(node.args) == 1 and not node.keywords:
            return _Link(node, node.func, function)
        return None

    def _global(self, names: list[str]) -> Any:
        """Return the object that a dotted name of the method's globals stands for, or None."""
        if not names or names[0] in self._method.__code__.co_varnames:
            return None
        found = self._method.__globals__.get(names[0])
        for name in names[1:]:
            found = getattr(found, name, None)
        return found

    def _chain(self, node: ast.expr) -> tuple[ast.expr, list[_Link]]:
        """Return what the first link is applied to, and the links."""
        links = []
        while (link := self._link(node)) is not None:
            links.append(link)
            node = node.args[0]  # type: ignore[attr-defined]
        return node, links[::-1]

    # ------------------------------------------------------------------------------- on the ops

    def _on_the_ops(self, body: list[ast.stmt], after: list[ast.stmt]) -> list[ast.stmt]:
        """Return the statements on the ops. after: those that follow them, up to a loop."""
        out: list[ast.stmt] = []
        for i, statement in enumerate(body):
            following = [*body[i + 1 :], *after]
            if isinstance(getattr(statement, "body", None), list):  # if, for, while, with
                follow = following if isinstance(statement, ast.If) else []
                for name in _BLOCKS:
                    block = getattr(statement, name, [])
                    setattr(statement, name, self._on_the_ops(block, follow))
            elif (norm := self._next_reader(statement, following)) is not None:
                path = ".".join(_dotted(norm)[1:])
                variable = self._sums.setdefault(path, f"_sum_{path.replace('.', '_')}")
                found = self._call_with_sum("_add_chain", norm, statement.value)  # type: ignore[attr-defined]
                both = ast.Assign([ast.Name(variable, ast.Store())], found)
                out.append(ast.copy_location(both, statement))
                index = ast.Constant(1)
                total = ast.Subscript(ast.Name(variable, ast.Load()), index, ast.Load())
                statement.value = total  # type: ignore[attr-defined]
            else:
                statement = self.visit(statement)
            out.append(statement)
        return out

    def _next_reader(self, statement: ast.stmt, following: Sequence[ast.stmt]) -> ast.expr | None:
        """Return the submodule that the sum which a statement assigns is given to next."""
        name = _target(statement)
        if name is None or not _is_sum(statement.value):  # type: ignore[attr-defined]
            return None
        names = {name}
        for x in following:
            if any(_is_in_place(y) for y in ast.walk(x)):
                return None
            if isinstance(x, ast.If) and not any(isinstance(y, _EXITS) for y in ast.walk(x)):
                continue
            if not isinstance(x, (ast.Assign, ast.Return, ast.Expr)) or x.value is None:
                return None
            for node in ast.walk(x.value):
                link = self._link(node)
                if link is not None and isinstance(link.what, str):
                    argument = node.args[0]  # type: ignore[attr-defined]
                    if isinstance(argument, ast.Name) and argument.id in names:
                        return link.expression
            if (target := _target(x)) is not None:
                same = isinstance(x.value, ast.Name) and x.value.id in names
                names = names | {target} if same else names - {target}
        return None

    def visit_Call(self, node: ast.Call) -> ast.AST:
        base, links = self._chain(node)
        if links:
            return self._applied(base, links)
        names = _dotted(node.func)
        inner = self._link(node.args[0]) if len(node.args) == 2 and not node.keywords else None
        if inner is None or not isinstance(inner.what, str) or names[:1] != self._names[:1]:
            return self.generic_visit(node)
        self._found.pairs.append((".".join(names[1:]), inner.what))
        x = node.args[0].args[0]  # type: ignore[attr-defined]
        given = [node.func, inner.expression, self.visit(x), self.visit(node.args[1])]
        return self._call("_run_pair", given, node)

    def _applied(self, base: ast.expr, links: list[_Link]) -> ast.expr:
        """Return the links applied to base, on the ops."""
        node: ast.expr
        first = links[0]
        if isinstance(first.what, str) and _is_sum(base):
            node, links = self._call_with_sum("_norm_of_sum", first.expression, base), links[1:]
        elif first.what in self._sums and isinstance(base, ast.Name):
            memo = ast.Name(self._sums[first.what], ast.Load())
            given: list[ast.expr] = [first.expression, base, memo]
            node, links = self._call("_norm_of", given, base), links[1:]
        else:
            node = self.visit(base)
        if len(links) > 2:
            self._found.chains.append(tuple(x.what for x in links))
            return self._call("_run_chain", [node, *(x.expression for x in links)], base)
        for link in links:  # their calls, as they are
            link.call.args[0] = node
            node = link.call
        return node

    def _call_with_sum(self, method: str, norm: ast.expr, total: Any) -> ast.Call:
        """Call a new method with (norm, a, b, *links): links applied to b, added to a."""
        a, b = total.left, total.right
        if self._link(b) is None and not any(isinstance(x, ast.Call) for x in ast.walk(b)):
            a, b = b, a  # a link, if there is one, is in b; what has an effect keeps its order
        base, links = self._chain(b)
        if links and links[0].what in self._sums and isinstance(base, ast.Name):
            base, links = self._applied(base, links[:1]), links[1:]
        else:
            base = self.visit(base)
        whats = tuple(x.what for x in links)
        self._found.norms.append((".".join(_dotted(norm)[1:]), whats))
        if len(links) > 2:
            self._found.chains.append(whats)
        given = [norm, self.visit(a), base, *(x.expression for x in links)]
        call = self._call(method, given, total)
        if a is total.right:
            call.keywords = [ast.keyword("reverse", ast.Constant(True))]
        return ast.fix_missing_locations(call)

    def _call(self, method: str, given: list[Any], place: ast.AST) -> ast.Call:
        call = ast.Call(self._own(method), [copy.deepcopy(x) for x in given], [])
        return ast.fix_missing_locations(ast.copy_location(call, place))

    def _own(self, method: str) -> ast.Attribute:
        return ast.Attribute(ast.Name(self._names[0], ast.Load()), method, ast.Load())


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a tree, without those in the function of a cast."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.Lambda):
            yield from _walk(child)


class _Substitute(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self._new if node is self._old else self.generic_visit(node)


def _target(statement: ast.stmt) -> str | None:
    """Return the name that a statement `name = value` assigns, or None."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    return getattr(statement.targets[0], "id", None)


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)


def _is_sum(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)


def _is_in_place(node: ast.AST) -> bool:
    """Return whether a statement or a call may change a tensor that a name stands for."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr[-1] == "_"
    stores = isinstance(getattr(node, "ctx", None), ast.Store) and not isinstance(node, ast.Name)
    return isinstance(node, ast.AugAssign) or (stores and not isinstance(node, ast.Tuple))


def _is_cast(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Lambda)


def _dotted(node: ast.AST) -> list[str]:
    """Return the names of `a.b.c`, or [] for another expression."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return [node.id, *names] if isinstance(node, ast.Name) else []
