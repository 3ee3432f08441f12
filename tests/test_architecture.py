"""The picture of the package: imports go one way, names stand in one place, files are where their
stem says.
"""

import ast
import functools
import graphlib
import importlib
import re
import sys

import pytest

import fastformer as ff
from benchmarks import ROOT
from fastformer.dispatch.operation import OPERATIONS
from fastformer.ops import functional

# A module may import those of the layers after its own.
LAYERS = [
    {"__main__"},
    {"cli"},
    {"training"},
    {"decoding", "drop_in", "tuning", "warming"},
    {"nn"},
    {"cache"},
    {"ops"},
    {"dispatch"},
    {"checks", "environment", "kernels"},
    {"plans"},
    {"batch_invariance", "cuda_graphs", "description", "eager", "numerics"},
    {"mask_tiles"},
    {"_version"},
]


FILES = sorted((ROOT / "fastformer").rglob("*.py"))


@functools.cache
def parsed(path):
    return ast.parse(path.read_text())


def name_of(path):
    return str(path.relative_to(ROOT / "fastformer").with_suffix(""))


def layer(name):
    return next(i for i, names in enumerate(LAYERS) if name in names)


def imports(path):
    """(name, at import time?) of each module, or name of a module, that a file imports."""
    tree = parsed(path)
    functions = (f for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.Lambda)))
    inside = {id(node) for f in functions for node in ast.walk(f)}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{a.name}" for a in node.names]
        yield from ((name, id(node) not in inside) for name in names)


def test_imports_go_one_way():
    for path in FILES:
        mine = path.relative_to(ROOT / "fastformer").parts[0].removesuffix(".py")
        if mine == "__init__":
            continue
        ours = ((n.split(".")[1], e) for n, e in imports(path) if n.startswith("fastformer."))
        for name, eager in ours:
            if name != mine and any(name in names for names in LAYERS):  # of another folder
                assert layer(name) > layer(mine), f"{path} imports {name}"
                assert not (name == "kernels" and eager), f"{path} imports kernels at once"


def test_imports_make_no_circle():
    """Also among the files of a folder, which LAYERS does not order."""
    stems = {
        f"fastformer.{name_of(f)}".replace("/", ".").removesuffix(".__init__"): f for f in FILES
    }
    del stems["fastformer"]
    graph = {path: set() for path in stems.values()}
    for path, found in graph.items():
        for name, _ in imports(path):
            of_name = [stems[n] for n in (name, name.rpartition(".")[0]) if n in stems]
            found |= {*of_name[:1]} - {path}
    assert sum(map(len, graph.values())) > len(graph)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


KERNELS = sorted((ROOT / "kernels").rglob("*.py"))


def test_kernels_know_torch_and_triton_only():
    """And of fastformer the description of attention, the tables of plans and `batch_invariant`."""
    allowed = {"torch", "triton", "numpy", *sys.stdlib_module_names}
    of_ours = tuple(f"fastformer.{x}." for x in ("description", "batch_invariance", "plans"))
    for path in KERNELS:
        names = {name for name, _ in imports(path) if not name.startswith(of_ours)}
        roots = {name.split(".")[0] for name in names}
        assert roots <= allowed, f"{path.name} imports {roots - allowed}"


def test_benchmarks_import_nothing_of_the_tests():
    """The tests import from benchmarks/, so that no change of a test breaks a measurement."""
    tests = {"tests", *(path.stem for path in (ROOT / "tests").rglob("*.py"))}
    for path in (ROOT / "benchmarks").rglob("*.py"):
        found = {name.split(".")[0] for name, _ in imports(path)}
        assert not found & tests, path


def private(name):
    return re.match("_[^_]", name) and name not in ("_fields", "_replace", "_asdict", "_make")


def private_names_of_others(path):
    """What a file imports or reads of another module though its name begins with an underscore."""
    tree, modules = parsed(path), set()
    for node in ast.walk(tree):
        ours = isinstance(node, ast.ImportFrom) and (
            node.level > 0 or node.module.split(".")[0] == "fastformer"
        )
        if ours:
            modules |= {a.asname or a.name for a in node.names}
            yield from (a.name for a in node.names if private(a.name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr):
            of = node.value.id if isinstance(node.value, ast.Name) else None
            if of in modules:
                yield f"{of}.{node.attr}"


def test_no_private_name_crosses_modules():
    found = {str(f): list(private_names_of_others(f)) for f in (*FILES, *KERNELS)}
    assert {f: names for f, names in found.items() if names} == {}


def test_every_op_has_its_files():
    for op in OPERATIONS:
        stem = OPERATIONS[op].kernel
        assert (ROOT / f"kernels/{stem}.py").is_file() or (ROOT / f"kernels/{stem}").is_dir(), stem
        for place in ("tests/ops/test_{}.py", "benchmarks/bench_{}.py"):
            assert (ROOT / place.format(stem)).is_file(), place.format(stem)


def test_every_op_is_public_and_documented():
    ops = [name for name, x in vars(functional).items() if callable(x)]
    assert len(ops) > 10
    for op in ops:
        function = getattr(ff, op)
        assert function is getattr(functional, op) and op in ff.__all__
        for part in ("Args:", "Returns:", "Raises:", "Source:"):
            assert part in function.__doc__, f"{op} has no {part}"
    for name in ff.__all__:
        assert name == "__version__" or getattr(ff, name).__doc__, f"{name} has no docstring"
        # `import fastformer.tune` would put a module of that name over the function.
        assert not [*(ROOT / "fastformer").glob(name), *(ROOT / "fastformer").glob(f"{name}.py")]


def test_only_backends_choose():
    """Nothing else asks where a tensor lies in order to pick a backend, or names the kernels."""
    for path in FILES:
        if path.stem not in ("backends", "batch_invariance", "cli", "copy_task", "environment"):
            assert "fastformer.kernels" not in _code(path), path.stem


def _code(path):
    """Source without docstrings and comments."""
    tree = ast.parse(path.read_text())  # which this changes
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant(None)
    return ast.unparse(tree)


def _functions(path):
    return [f for f in ast.walk(parsed(path)) if isinstance(f, ast.FunctionDef)]


def test_functions_are_short():
    """At most 80 lines each, without the docstring."""
    for path in (*FILES, *KERNELS):
        for function in _functions(path):
            lines = function.end_lineno - function.lineno + 1
            if ast.get_docstring(function) is not None:
                lines -= function.body[0].end_lineno - function.body[0].lineno + 1
            assert lines <= 80, f"{path.stem}: {function.name} has {lines} lines"


def _is_kernel(function):
    return any(ast.unparse(d) in ("triton.jit", "gluon.jit") for d in function.decorator_list)


def test_kernels_take_few_arguments():
    """A kernel takes at most 16, and a call within one passes at most 8. TMA descriptors that the
    host makes, which Triton does not find in a group, are not counted.
    """
    kernels = [f for path in KERNELS for f in _functions(path) if _is_kernel(f)]
    helpers = {f.name for f in kernels}
    assert {"load_rows", "dropout_keep"} <= helpers
    for function in kernels:
        names = [argument.arg for argument in function.args.args]
        assert len([n for n in names if not n.endswith("_map")]) <= 16, function.name
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") in helpers:
                passed = len(call.args) + len(call.keywords)
                assert passed <= 8, f"{function.name} passes {passed} to {call.func.id}"


def test_no_test_skips_for_want_of_a_module_of_ours():
    """pytest.importorskip skips where a module has moved, too: with Triton each has to be there."""
    pytest.importorskip("triton")
    text = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    names = set(re.findall(r'importorskip\("(fastformer[.\w]*)', text))
    assert len(names) > 10
    for name in sorted(names):
        importlib.import_module(name)


def test_kernels_replace_no_fields():
    """Within a kernel, Triton 3.9 hands on a NamedTuple as a tuple of its own, without _replace."""
    for path in KERNELS:
        for node in _functions(path):
            compiled = {ast.unparse(x).split("(")[0] for x in node.decorator_list}
            if compiled & {"triton.jit", "triton.constexpr_function"}:
                assert "._replace" not in ast.unparse(node), f"{path}: {node.name}"


def test_the_tuples_of_the_kernels_say_what_they_are_of():
    """Not `Tiles` in five files: one name each."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "kernels").rglob("*.py")]
    names = [node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    for kind in ("Case", "Tiles", "Strides", "Span"):
        ours = [name for name in names if name.endswith(kind)]
        assert len(ours) > 1 and len({*ours}) == len(ours), ours
