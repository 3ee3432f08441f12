"""`warm_up`: what it compiles, over the stand-in for a GPU, and what it leaves as it was."""

import os
import subprocess
import sys
import textwrap
import threading
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastformer as ff
from benchmarks import ROOT
from benchmarks.gpu import stand_in
from fastformer.dispatch import backends

over_the_stand_in = pytest.mark.skipif(stand_in.obstacle() is not None, reason="no stand-in")

SETUP = """
import json, os, sys, tempfile
from pathlib import Path
import torch
from torch import nn
import fastformer as ff
from benchmarks.gpu import stand_in
from fastformer.kernels.launch import Launch
from triton import knobs
from triton.runtime.jit import JITFunction

folder, log = tempfile.TemporaryDirectory(), Path(sys.argv[1])
gpu = stand_in.install(Path(folder.name))
compile = JITFunction._do_compile
asked = []  # in this process, whether it was in the cache or not

def listen(*, src, cache_hit, **_):  # in forked processes, too
    if not cache_hit:
        with log.open("a") as file:
            print(src.hash(), file=file)

def note(kernel, *rest):
    asked.append(kernel.__name__)
    return compile(kernel, *rest)

knobs.compilation.listener, JITFunction._do_compile = listen, note
ff.use_backend("triton")
torch.manual_seed(0)

def compiled():
    return log.read_text().split() if log.exists() else []

def transformer(N=1):
    model = ff.make_model(11, 11, N=N, d_model=32, d_ff=64, h=2).bfloat16()
    tokens, mask = torch.randint(1, 11, (2, 16)), torch.ones(2, 1, 16, dtype=torch.bool)
    return model, (tokens, tokens, mask, ff.subsequent_mask(16))
"""


@pytest.fixture
def run(fresh, tmp_path):
    """run(code, **environment): what it prints in a process that has a stand-in for a GPU."""

    def run(code, **environment):
        cache = environment.setdefault("TRITON_CACHE_DIR", str(tmp_path / "cache"))
        assert cache
        printed = fresh(
            SETUP + textwrap.dedent(code),
            str(tmp_path / "log"), TRITON_INTERPRET="0", **environment,
        )  # fmt: skip
        assert "Traceback" not in printed, printed
        assert "FP_FUSION" not in printed  # Triton 3.9 warns if a launch leaves it to a default
        return printed.split()[-1]  # torch may have warned that there is no driver

    return run


@over_the_stand_in
@pytest.mark.parametrize("processes", [1, 2])
def test_the_step_after_it_compiles_nothing(run, processes):
    """Each kernel of a training step is compiled once, and none is launched before the step. What
    is loaded is not counted again, but a call of other lengths, or in evaluation, is.
    """
    code = f"""
        from dataclasses import dataclass
        @dataclass
        class Output:
            loss: torch.Tensor
            x: torch.Tensor
        norm = nn.Sequential(ff.LayerNorm(32), ff.MultiHeadedAttention(2, 32)).bfloat16()
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm, self.attention = norm
            def forward(self, x):
                out = self.attention(*[self.norm(x)] * 3)
                return Output(out.float().pow(2).sum(), x)
        block, x = Block(), torch.randn(2, 16, 32).bfloat16()
        kernels, seconds = ff.warm_up(block, x, processes={processes})
        assert kernels == len(compiled()) == len({{*compiled()}}) > 3, (kernels, compiled())
        assert gpu.launches == 0 and seconds > 0
        assert all(p.grad is None for p in block.parameters())
        assert ff.warm_up(block, x, processes={processes})[0] == 0 and gpu.launches == 0
        asked.clear()
        block(x).loss.backward()
        assert not asked and len(compiled()) == kernels <= gpu.launches, asked
        with torch.no_grad():
            longer = ff.warm_up(block, torch.randn(2, 600, 32).bfloat16(), processes=1)[0]
        print(0 < longer < kernels)
    """
    assert run(code) == "True"


@over_the_stand_in
@pytest.mark.with_all
def test_ranks_share_the_work(tmp_path):
    """Of processes that call it at once one compiles; the others wait, and read the cache."""
    code = """
model, inputs = transformer()
kernels, _ = ff.warm_up(model, *inputs, processes=2)
assert len(asked) >= kernels
print(kernels)
"""
    own = {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", SETUP + code, str(tmp_path / "log")]
    environment = os.environ | own
    ranks = [
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    found = [rank.communicate()[0].split()[-1] for rank in ranks]
    compiled = (tmp_path / "log").read_text().split()
    assert found == [str(len(compiled))] * 2 and len({*compiled}) > 12


@over_the_stand_in
@pytest.mark.with_all
@pytest.mark.parametrize("kind", ["transformer", "encoder", "checkpointed", "bert"])
def test_models(run, kind):
    """A model, an accelerated one, one that is computed again in the backward, and one of Hugging
    Face: in training nothing is left to compile, nor after torch.compile.
    """
    code = f"""
        kind = {kind!r}
        if kind == "transformer":
            model, inputs = transformer(2)
            given, model = {{}}, torch.compile(model)
            step = model._orig_mod
        elif kind == "bert":
            from transformers import BertConfig, BertForMaskedLM
            ff.register_transformers()
            config = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=99)
            step = model = BertForMaskedLM(BertConfig(intermediate_size=64, **config)).bfloat16()
            model.set_attn_implementation("fastformer")
            ff.accelerate(model)
            tokens = torch.randint(0, 99, (2, 16))
            inputs, given = (), dict(input_ids=tokens, labels=tokens)
        else:
            layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
            step = model = nn.TransformerEncoder(layer, 2).bfloat16()
            ff.accelerate(model)
            inputs, given = [torch.randn(2, 16, 32).bfloat16().requires_grad_()], {{}}
            if kind == "checkpointed":
                class Checkpointed(nn.Module):
                    def __init__(self, layers):
                        super().__init__()
                        self.layers = layers
                    def forward(self, x):
                        for layer in self.layers:
                            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
                        return x
                step = model = Checkpointed(model.layers)
        model.train()
        kernels, _ = ff.warm_up(model, *inputs, **given)
        assert kernels == len(compiled()) > 5 and gpu.launches == 0
        asked.clear()
        out = step(*inputs, **given)
        (out.loss if kind == "bert" else out).float().sum().backward()
        assert not asked and gpu.launches > kernels, asked
        print("done")
    """
    assert run(code) == "done"


@over_the_stand_in
@pytest.mark.with_all
def test_errors_of_the_compiler(run):
    code = """
        def fail(*_, **__):
            raise ValueError("no compiler")
        JITFunction._do_compile = fail
        model, inputs = transformer()
        call = Launch.__call__
        for processes in (1, 2):
            try:
                ff.warm_up(model, *inputs, processes=processes)
            except ValueError as wrong:
                assert str(wrong) == "no compiler"
            else:
                raise AssertionError("no error")
        assert Launch.__call__ is call
        print("refused")
    """
    assert run(code) == "refused"


class Stateful(nn.Module):
    """Has buffers that change, tied weights, dropout, and a kernel of each kind."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = ff.Embeddings(8, 11), nn.BatchNorm1d(8)
        self.out, self.dropout = nn.Linear(8, 11, bias=False), nn.Dropout(0.5)
        self.out.weight = self.embed.lut.weight

    def forward(self, x, fail=False):
        if fail:
            raise KeyError("the model's own")
        x = ff.scaled_dot_product_attention(*[self.embed(x)[:, None]] * 3, dropout_p=0.5)
        return {"out": [self.out(self.dropout(self.norm(x.flatten(0, 2))))]}


@dataclass
class Output:
    loss: torch.Tensor
    extra: object = None


class Shared(nn.Module):
    """Holds a module twice, and a parameter that is more than its values."""

    def __init__(self):
        super().__init__()
        layer = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.layers, self.weight = nn.ModuleList([layer, layer]), nn.Parameter(torch.ones(8))
        self.weight.scale = 2.0
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        for layer in self.layers:
            x = ff.layer_norm(layer(x) * self.weight * self.weight.scale, 8)
        return Output(x.sum(), extra=[x, None, "x"])


def test_modules_that_are_held_twice(backend, device):
    pytest.importorskip("triton")
    model, x = Shared().to(device), torch.randn(3, 8, device=device)
    parameters, buffers = [*model.parameters()], [*model.buffers()]
    values = [b.clone() for b in buffers]
    ff.warm_up(model, x)
    assert all(p is q for p, q in zip(parameters, model.parameters()))
    assert all(b is c for b, c in zip(buffers, model.buffers()))
    assert all(map(torch.equal, values, buffers)) and model.calls == 0
    model(x).loss.backward()
    assert all(p.grad is not None for p in parameters)


def test_a_reentrant_checkpoint(device):
    """It writes the gradients of its parameters; they are given back."""
    pytest.importorskip("triton")

    class Checkpointed(nn.Linear):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=True)

    model, x = Checkpointed(8, 8, device=device), torch.randn(2, 8, device=device)
    ff.warm_up(model, x.requires_grad_())
    assert model.weight.grad is None and x.grad is None
    model(x).sum().backward()
    assert model.weight.grad.any() and x.grad.any()


def test_other_threads_launch(device):
    """What another thread computes meanwhile is right, and two calls at once do not mix."""
    pytest.importorskip("triton")
    x, found = torch.randn(2, 8, device=device), []
    want = torch.nn.functional.layer_norm(x, (8,))
    began, end = threading.Event(), threading.Event()

    class Slow(nn.Module):
        def forward(self, x):
            out = ff.layer_norm(x, 8)
            began.set()
            assert end.wait(60)
            return out

    def warm_up(model):
        with ff.use_backend("triton"):
            ff.warm_up(model, x)

    threads = [threading.Thread(target=warm_up, args=[m]) for m in (Slow(), ff.LayerNorm(8))]
    threads[0].start()
    assert began.wait(60)
    threads[1].start()
    with ff.use_backend("triton"):
        found.append(ff.layer_norm(x, 8))
        end.set()
        for thread in threads:
            thread.join()
        found.append(ff.layer_norm(x, 8))
    for have in found:
        torch.testing.assert_close(have, want)


@pytest.fixture(params=["reference", "triton"])
def backend(request):
    with ff.use_backend(request.param):
        yield request.param


@pytest.mark.parametrize("grads", [False, True])
def test_the_model_stays_as_it_is(backend, device, grads):
    """On a CPU no kernel is compiled; those that the interpreter would run are left out, too."""
    pytest.importorskip("triton")
    model, tokens = Stateful().to(device), torch.randint(0, 11, (3, 4), device=device)
    if grads:
        model(tokens)["out"][0].sum().backward()
    seen = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(seen.append)
    state = [x.clone() for x in model.state_dict().values()]
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    random = torch.get_rng_state()
    kernels, seconds = ff.warm_up(model, tokens)
    assert (kernels > 0) == (device.type == "cuda") and seconds > 0 and not seen
    assert all(map(torch.equal, state, model.state_dict().values()))
    for p, grad in zip(model.parameters(), gradients):
        assert (p.grad is None and grad is None) or torch.equal(p.grad, grad)
    assert torch.equal(random, torch.get_rng_state())
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert ff.warm_up(model.eval(), tokens)[1] > 0
    out = model(tokens)["out"][0]  # runs again
    assert out.isfinite().all() and out.any()


def test_kernels_that_are_not_launched_give_zeros(device):
    """And the gradient of an input, or what the input is computed from, stays as it is."""
    pytest.importorskip("triton")
    seen = []

    class Norm(nn.Module):
        def forward(self, x):
            out = ff.layer_norm(x, 8)
            out.register_hook(seen.append)
            seen.append(out.detach())
            return out

    leaf = torch.randn(2, 8, device=device, requires_grad=True)
    torch.use_deterministic_algorithms(True)  # new memory is NaN
    try:
        with ff.use_backend("triton"):
            inner = leaf * 2
            ff.warm_up(Norm(), leaf)
            ff.warm_up(Norm(), inner)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(seen) == 4 and not any(x.any() for x in seen) and leaf.grad is None
    inner.sum().backward()
    assert leaf.grad.eq(2).all()


def test_errors(device):
    model = Stateful().to(device)
    with pytest.raises(TypeError, match=r"model is a function; expected an nn\.Module"):
        ff.warm_up(lambda: None)
    with pytest.raises(ValueError, match="processes is -1; expected 0 or more"):
        ff.warm_up(model, processes=-1)
    with pytest.raises(TypeError, match="processes is a float"):
        ff.warm_up(model, processes=2.0)
    for _ in range(2):  # and the launches are as before
        with pytest.raises(KeyError, match="the model's own"):
            ff.warm_up(model, torch.zeros(1, 1, device=device), fail=True)
    tokens = torch.zeros(2, 3, dtype=torch.int64, device=device)
    with ff.use_backend("triton"):
        assert model(tokens)["out"][0].any()


def test_without_triton(monkeypatch):
    monkeypatch.setattr(backends, "_HAS_TRITON", False)
    assert ff.warm_up(nn.Linear(2, 2))[0] == 0


def test_wrapped_by_ddp(single_process):
    """Its module runs, so that no gradient is reduced, and its next step is as usual."""
    for unused in (False, True):
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2), find_unused_parameters=unused)
        for _ in range(2):
            assert ff.warm_up(model, torch.ones(1, 2))[0] == 0
            model(torch.ones(1, 2)).sum().backward()
        assert model.module.weight.grad.eq(2).all()


def test_sharded_by_fsdp(single_process):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[0], mesh=(mesh := init_device_mesh("cpu", (1,))))
    fully_shard(model, mesh=mesh)
    assert ff.warm_up(model, torch.ones(1, 2))[0] == 0
    assert all(p.grad is None for p in model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    before = [p.grad.full_tensor() for p in model.parameters()]
    ff.warm_up(model, torch.ones(1, 2))
    assert all(map(torch.equal, before, (p.grad.full_tensor() for p in model.parameters())))


@pytest.fixture
def single_process(monkeypatch, tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
