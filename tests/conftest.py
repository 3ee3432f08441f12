"""The numerics policy, kernels in small tiles, and other fixtures."""

import contextlib
import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fastformer import numerics, use_backend
from fastformer.dispatch import state
from fastformer.plans import forget

# The package of the benchmarks, which is not installed. Once it is imported, its modules are found
# without the checkout on the path, where the folder kernels/ would hide Hugging Face's `kernels`.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import benchmarks

sys.path.pop(0)

# The measurements of the machine that the tests run on are not what they test.
os.environ.setdefault("FASTFORMER_TUNING", "off")


def _run(function, tensors, constants, backend, cotangent, use_formula):
    leaves = {
        name: x.detach().requires_grad_()
        for name, x in tensors.items()
        if cotangent is not None and x is not None and x.is_floating_point()
    }
    with use_backend(backend):
        if use_formula:
            with state.use_formula():
                output = function(**{**tensors, **leaves}, **constants)
        else:
            output = function(**{**tensors, **leaves}, **constants)
        if cotangent is None:
            return {"output": output}
        grads = torch.autograd.grad(output, list(leaves.values()), cotangent.to(output.dtype))
    return {"output": output.detach(), **{"grad of " + n: g for n, g in zip(leaves, grads)}}


def check_against_oracle(
    function, tensors, small=False, gradients=True, only_zeros=False, **constants
):
    """The numerics policy: the current backend against the written-out reference in float64, output
    and, with `gradients`, every gradient. A call whose gradients are all zero is refused, because
    it would compare nothing, unless `only_zeros` says that they have to be.

    `small`: of a few elements eager's may be right by luck, and a gradient may be the small
    difference of large terms (it is zero at the score of an only key). So eager's error is the
    largest of five, at inputs near these; float32 may have it too; and a rounding (1e-6 in float32)
    of the longest row of the cotangent, or of all of it where eager's error is zero, is nothing.
    """
    from fastformer import current_backend

    floating = {n: x for n, x in tensors.items() if x is not None and x.is_floating_point()}
    dtype = next(iter(floating.values())).dtype
    with use_backend("reference"), torch.no_grad():
        shape = function(**_wide(tensors), **constants).shape
    cotangent = torch.randn(shape, dtype=torch.float64).to(dtype)
    cotangent = cotangent.to(next(iter(floating.values())).device)
    if small and torch.rand(()) < 0.5:  # with a step, and the dimensions the other way round
        other = torch.arange(cotangent.ndim - 1, -1, -1).tolist()
        cotangent = torch.stack([cotangent.permute(other)] * 2, -1)[..., 0].permute(other)
    cotangent = cotangent if gradients else None

    got = _run(function, tensors, constants, current_backend(), cotangent, False)
    oracle = _run(function, _wide(tensors), constants, "reference", cotangent, True)
    found = [x for name, x in oracle.items() if name != "output" and x.numel()]
    if found and not small:
        zeros = not any(x.any() for x in found)
        assert zeros == only_zeros, f"the oracle's gradients are {'' if zeros else 'not '}all zero"
    peers = []
    if small or dtype in (torch.float16, torch.bfloat16):
        peers.append(_eager_errors(function, tensors, constants, cotangent, oracle))
    for _ in range(4 * small):
        near = {n: x * (1 + torch.randn_like(x) / 100) for n, x in floating.items()}
        peers.append(_eager_errors(function, {**tensors, **near}, constants, cotangent))
    for name, want in oracle.items():
        have, gradient = got[name], name != "output"
        assert have.shape == want.shape, f"{name}: shape {have.shape}, expected {want.shape}"
        assert have.isfinite().all(), f"{name}: not finite"
        peer = max((float(errors[name]) for errors in peers), default=0.0)
        assert peer < float("inf"), f"{name}: eager PyTorch has no finite result"
        problem = numerics.disagreement(have, want, peer, gradient, dtype)
        if small and problem:
            bound = numerics.largest_error(dtype, peer, _largest(want), gradient)
            if gradient:  # of a zero, all of the cotangent counts; else its longest row
                rows = cotangent.double().reshape(-1, shape[-1] if shape else 1).norm(dim=1)
                nothing = rows.max() if peer and rows.numel() else rows.norm()
                bound += max(1e-6, torch.finfo(dtype).eps / 2) * nothing
            if _largest(have.double() - want) <= bound:
                continue
        assert problem is None, f"{name} {problem}; eager {peer:.1e}"


def _wide(tensors):
    return {n: x.double() if x is not None and x.is_floating_point() else x
            for n, x in tensors.items()}  # fmt: skip


def _largest(x):
    return x.abs().max() if x.numel() else torch.tensor(0.0)


def _eager_errors(function, tensors, constants, cotangent, oracle=None):
    """The largest error of each result of eager PyTorch, against `oracle`, if it is known."""
    eager = _run(function, tensors, constants, "reference", cotangent, True)
    if oracle is None:
        oracle = _run(function, _wide(tensors), constants, "reference", cotangent, True)
    return {name: _largest(eager[name].double() - want) for name, want in oracle.items()}


@pytest.fixture(scope="session")
def against_oracle():
    return check_against_oracle


@pytest.fixture(autouse=True)
def launches_of_its_own():
    """No launch is remembered past a test, which may have changed what launches are made from."""
    yield
    forget()


FRESH = """
import json, os, sys, traceback
import torch

for line in sys.stdin:
    code, arguments, environment = json.loads(line)
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.dup2(writer, 1), os.dup2(writer, 2)
        sys.argv[1:] = arguments
        os.environ |= environment
        try:
            exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(0)
    os.close(writer)
    with open(reader) as printed:
        print(json.dumps(printed.read().strip()), flush=True)
    os.wait()
"""


@pytest.fixture(scope="session")
def fresh():
    """fresh(code, *arguments, **environment): what the code prints, errors included, in a process
    that has imported torch alone. It is forked from one that has, which saves seconds.
    """
    chosen = "TRITON_INTERPRET", "FASTFORMER_BACKEND"
    environment = {name: x for name, x in os.environ.items() if name not in chosen}
    environment["PYTHONPATH"] = str(Path(benchmarks.__file__).parents[1])
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    server = subprocess.Popen([sys.executable, "-c", FRESH], env=environment, **pipes)

    def fresh(code, *arguments, **environment):
        print(json.dumps((code, arguments, environment)), file=server.stdin, flush=True)
        return json.loads(server.stdout.readline())

    yield fresh
    server.communicate()


@pytest.fixture(scope="session")
def compiled():
    """compiled(name): what the compile gate's worker answers to a case; with `translate`, the
    digests of its GPU IR alone.
    """
    from benchmarks.proof import cases

    worker = cases.Worker()

    @functools.cache
    def answer(name, translate=False):
        return worker.ask({**cases.CASES[name], "translate": translate})

    yield answer
    worker.close()


@pytest.fixture
def spread():
    """spread(x, dim): x with what follows along `dim` so far apart that the last stands past 2^31
    elements. On a CPU, memory that nothing touches is not there.
    """

    def spread(x, dim=0):
        strides = list(x.contiguous().stride())
        strides[dim] = -(-(2**31) // (x.shape[dim] - 1))
        assert strides[dim] >= x.numel()
        size = sum((n - 1) * s for n, s in zip(x.shape, strides)) + 1
        if x.device.type == "cpu":
            kind = {1: np.uint8, 2: np.uint16}[x.element_size()]
            flat = torch.from_numpy(np.empty(size, kind)).view(x.dtype)
        else:
            flat = torch.empty(size, dtype=x.dtype, device=x.device)
        return flat.as_strided(x.shape, strides).copy_(x)

    return spread


@pytest.fixture
def same_when_far(spread):
    """same_when_far(function, tensors, far, dim): outputs and gradients have the same bits where
    tensors[far] is spread out along `dim`. Without a "gradient" it is that of the sum of squares;
    those of `fixed` have none.
    """

    def same_when_far(function, tensors, far, dim=0, fixed=()):
        results = []
        for given in (tensors, {**tensors, far: spread(tensors[far], dim)}):
            leaves = {name: x.detach() for name, x in given.items()}  # the same memory, not a copy
            gradients = [leaves.pop(name) for name in tensors if name.startswith("gradient")]
            moving = [name for name, x in leaves.items() if x.is_floating_point()]
            wanted = [leaves[name].requires_grad_() for name in moving if name not in fixed]
            outputs = function(**leaves)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            gradients = gradients or [2 * x.detach() for x in outputs]
            results.append([x.detach() for x in outputs])
            results[-1] += torch.autograd.grad(outputs, wanted, gradients) if wanted else []
        assert all(map(torch.equal, *results))

    return same_when_far


@pytest.fixture
def rounded_once():
    """rounded_once(function, tensors, fixed): the kernels' output and gradients are those in
    float64, rounded at their end alone: to 16 bits, the dtype of the tensors. Those of `fixed` have
    no gradient.
    """
    pytest.importorskip("triton")

    def rounded_once(function, tensors, fixed=()):
        dtype, results, cotangent = next(iter(tensors.values())).dtype, [], None
        for backend, kept in (("triton", dtype), ("reference", torch.float64)):
            given = {name: x.detach().to(kept) for name, x in tensors.items()}
            leaves = [x.requires_grad_() for name, x in given.items() if name not in fixed]
            with use_backend(backend):
                out = function(**given)
            cotangent = torch.randn_like(out) if cotangent is None else cotangent
            results.append((out, *torch.autograd.grad(out, leaves, cotangent.to(kept))))
        for a, b in zip(*results):
            assert (a != b.to(dtype)).double().mean() < 0.05  # those between two

    return rounded_once


@pytest.fixture
def tiles(monkeypatch):
    """tiles(BM, BN): the tiles of every attention kernel, for the rest of the test."""
    plan = pytest.importorskip("fastformer.kernels.attention.plan")

    def tiles(*blocks):
        monkeypatch.setattr(plan, "configuration", lambda *_: plan.AttentionTiles(*blocks, 4, 1))
        forget()

    yield tiles
    forget()


@pytest.fixture
def small_tiles():
    """small_tiles(BM, BN): within it a call of any kernel takes several programs and several turns
    of their loops; attention in tiles of BM queries and BN keys.
    """

    @contextlib.contextmanager
    def small_tiles(BM=16, BN=16):
        from fastformer.kernels import embedding, partial_sums, products, rotary
        from fastformer.kernels import feed_forward as fed
        from fastformer.kernels.attention import plan, short_backward
        from fastformer.kernels.cross_entropy import launchers as cross_entropy
        from fastformer.kernels.layer_norm import launchers as norm

        def short_tiles(kernel, call, former=short_backward.tiles):
            """All keys are one tile of `tiny`."""
            given = former(kernel, call)
            return given and given._replace(BM=BM, BN=BN if kernel == "scratch" else given.BN)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plan, "configuration", lambda *_: plan.AttentionTiles(BM, BN, 4, 1))
            patch.setattr(short_backward, "tiles", short_tiles)
            patch.setitem(
                fed.CONFIGURATIONS, "interpreter", (fed.ProductTiles(16, 16, 16, 4, 1),) * 2
            )
            for module in (fed, products):
                patch.setattr(module, "GROUP_ROWS", 2)  # three row blocks fill one and a half
            patch.setattr(fed, "ELEMENTWISE", fed.Tile(16, 16))
            patch.setattr(norm, "ONE_BLOCK", 16)
            patch.setattr(norm, "configuration", lambda n, arch: norm.NormTiles(2, 16, 4))
            patch.setattr(norm, "PARTIAL_SUMS", 2)
            patch.setattr(norm, "WIDE_WEIGHTS", norm.NormTiles(2, 16, 4))
            patch.setattr(partial_sums, "TILE", partial_sums.Tile(1, 16))
            patch.setattr(embedding, "configuration", lambda *_: embedding.EmbeddingTiles(4, 16))
            own = rotary.configuration
            patch.setattr(rotary, "configuration", lambda *given: own(*given)._replace(rows=4))
            patch.setattr(rotary, "heads_of_a_program", lambda *_: 2)
            patch.setattr(cross_entropy, "configuration", lambda *_: (16, 4))
            patch.setattr(cross_entropy, "group_size", lambda *_: 4)
            patch.setattr(cross_entropy, "CHUNK", 4)
            forget()
            yield
        forget()

    return small_tiles


@pytest.fixture
def work(monkeypatch):
    """work(call): how many kernels the call launches, in how many programs, and how many products
    of tiles and loads without a mask these take (interpreter only).
    """
    if torch.cuda.is_available():
        pytest.skip("counted in the interpreter")
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    counts = SimpleNamespace(launches=0, programs=0, products=0, unmasked=0)

    def launch(self, *arguments, former=executor.__call__, **options):
        counts.launches += 1
        counts.programs += math.prod(self.grid)
        return former(self, *arguments, **options)

    def product(self, *operands, former=builder.create_dot):
        counts.products += 1
        return former(self, *operands)

    def load(self, *operands, former=builder.create_load):
        counts.unmasked += 1
        return former(self, *operands)

    monkeypatch.setattr(executor, "__call__", launch)
    monkeypatch.setattr(builder, "create_dot", product)
    monkeypatch.setattr(builder, "create_load", load)

    def work(call):
        counts.launches = counts.programs = counts.products = counts.unmasked = 0
        call()
        return counts

    return work
