"""What a whole call of a public function costs the host.

On a GPU the operands are so small that the device keeps up: it is the time until the host has
handed over the calls, beside torch's own ops. Without one, the calls run over a stand-in for the
driver, which starts nothing, in a process of its own:

    python -m benchmarks.bench_host_cost CALLS ROUNDS
    python -m benchmarks.bench_host_cost CALLS ROUNDS --write    to benchmarks/results

It measures, in turn, the call; the launches that it makes, alone, with the same pointers; torch's
own op, which computes on the CPU, so that its attention has fewer queries and keys; and
`torch.empty_like` of the first tensor of the call. Products are torch's own, and are computed. The
last line is a JSON object: for "OP, MODE" the microseconds of each by round, and the number of the
launches. `python -m benchmarks.report --evidence` tabulates the least ones in docs/evidence.md.
"""

import argparse
import functools
import itertools
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastformer as ff
from benchmarks import ROOT, answer, table
from benchmarks.gpu import stand_in
from benchmarks.peers import GPU

RESULT = ROOT / "benchmarks" / "results" / "host_cost.json"
CALLS, ROUNDS = 1000, 7 if GPU else 3
AT_ONCE = 100  # calls: fewer than what may wait for the device at a time
MODES, P = ["forward", "forward+backward"], 0.1
LAYER = "encoder layer"
OPS = ["attention", "attention, mask and dropout", "layer_norm", "dropout_add_layer_norm"]
OPS += ["feed_forward", "cross_entropy", LAYER]


def _torch_add(x, residual, w, b):
    return F.layer_norm(residual + F.dropout(x, P), w.shape, w, b)


def _torch_feed_forward(x, w_1, b_1, w_2, b_2):
    return F.linear(F.dropout(F.linear(x, w_1, b_1).relu(), P), w_2, b_2)


def _layer(ours, like):
    """Return an encoder layer of width 64 that trains, as a function of x and a mask."""
    if ours:
        layer = ff.make_model(8, 8, N=1, d_model=64, d_ff=128, h=1, dropout=P).encoder.layers[0]
        return layer.to(like), layer.parameters()
    options = dict(dropout=P, batch_first=True, norm_first=True)
    layer = nn.TransformerEncoderLayer(64, 1, 128, **options).to(like)
    return lambda x, mask: layer(x), layer.parameters()


def public_call(op, with_gradient, ours=True, device="cpu", dtype=torch.bfloat16, length=128):
    """Return a call of a public function, or of torch's own, on small operands; and the first."""

    def random(*shape):
        return torch.randn(*shape, device=device, dtype=dtype).requires_grad_()

    attention = ff.scaled_dot_product_attention, F.scaled_dot_product_attention
    q, k, v = (random(2, length, 8, 64).transpose(1, 2) for _ in range(3))
    x, residual, w, b = random(16, 64), random(16, 64), random(64), random(64)
    w_1, w_2, b_1 = random(128, 64), random(64, 128), random(128)
    mask = torch.ones(2, 1, 1, length, dtype=torch.bool, device=device)
    layer, parameters = _layer(ours, x) if op == LAYER else (None, ())
    *functions, given = {
        "attention": (*attention, (q, k, v)),
        "attention, mask and dropout": (*attention, (q, k, v, mask, P)),
        "layer_norm": (ff.layer_norm, F.layer_norm, (x, (64,), w, b)),
        "dropout_add_layer_norm": (
            lambda *given: ff.dropout_add_layer_norm(*given, P)[0], _torch_add, (x, residual, w, b),
        ),
        "feed_forward": (
            lambda *given: ff.feed_forward(*given, "relu", P), _torch_feed_forward,
            (x, w_1, b_1, w_2, b),
        ),
        "cross_entropy": (
            ff.cross_entropy, F.cross_entropy,
            (x, torch.zeros(16, dtype=torch.int64, device=device)),
        ),
        LAYER: (layer, layer, (random(1, 16, 64), mask[:1, 0, :, :16])),
    }[op]  # fmt: skip
    function = functions[not ours]
    if not with_gradient:
        return torch.no_grad()(lambda: function(*given)), given[0]
    leaves = [x for x in (*given, *parameters) if isinstance(x, torch.Tensor) and x.requires_grad]
    grad = torch.ones_like(function(*given))
    return lambda: torch.autograd.grad(function(*given), leaves, grad), given[0]


@functools.cache
def over_the_stand_in():
    return answer("-m", "benchmarks.bench_host_cost", CALLS, ROUNDS)


@pytest.mark.skipif(not GPU and stand_in.obstacle() is not None, reason=str(stand_in.obstacle()))
@pytest.mark.parametrize("provider", ["torch", "auto"] if GPU else ["triton"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", OPS)
def test_public_call(measure, benchmark, device, op, mode, provider):
    samples = []  # seconds of a thousand calls: milliseconds of one
    if GPU:
        call, _ = public_call(op, mode != "forward", provider == "auto", device)
        call()
        for _ in range(0 if benchmark.disabled else ROUNDS):
            torch.cuda.synchronize()
            samples.append(_microseconds(call, AT_ONCE, time.perf_counter) / 1e3)
    elif not benchmark.disabled:
        samples = [us / 1e3 for us in over_the_stand_in()[f"{op}, {mode}"]["fastformer"]]
    group = f"public call of {op} {mode}, host, {CALLS} calls"
    backend = None if provider == "torch" else "triton"
    measure(samples=samples, group=group, backend=backend, dtype="bfloat16")


def _microseconds(call, times, clock=time.process_time):
    started = clock()
    for _ in range(times):
        call()
    return (clock() - started) / times * 1e6


def launches_of(call):
    """Return the launches that a call makes, alone, as a call, and how many there are."""
    from fastformer.kernels.launch import Launch

    made, launch = [], Launch.__call__

    def record(self, *pointers):
        made.append((self, pointers))
        launch(self, *pointers)

    call()
    Launch.__call__ = record
    try:
        call()
    finally:
        Launch.__call__ = launch

    def run():
        for one, pointers in made:
            launch(one, *pointers)

    return run, len(made)


def measured(op, mode, calls, rounds):
    """Return the microseconds of a call, and of what it is compared with, by round."""
    with_gradient = mode != "forward"
    call, first = public_call(op, with_gradient)
    launches, kernels = launches_of(call)
    torchs, _ = public_call(op, with_gradient, ours=False, dtype=torch.float32, length=16)
    first = first.detach()
    given = dict(fastformer=call, launches=launches, torch=torchs)
    given["empty_like"] = lambda: torch.empty_like(first)
    for function in given.values():
        _microseconds(function, min(100, calls))
    found = {name: [] for name in given}
    for _ in range(rounds):
        for name, function in given.items():
            found[name].append(round(_microseconds(function, calls), 3))
    return found | dict(kernels=kernels)


def lines(data):
    """Return the lines of a Markdown table."""
    header = ["call", "fastformer", "its launches", "torch's op, computed", "`empty_like`"]
    rows = []
    for name, us in data["rows"].items():
        unit = us["empty_like"]
        names = "fastformer", "launches", "torch"
        cells = [f"{us[key]:.1f} µs ({us[key] / unit:.0f})" for key in names]
        cells[1] += f", {us['kernels']}"
        rows.append([name, *cells, f"{unit:.2f} µs"])
    return table(header, rows)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("calls", type=int)
    parser.add_argument("rounds", type=int)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    options = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "0"
    os.environ.setdefault("TRITON_CACHE_DIR", str(ROOT / ".cache" / "triton"))
    torch.set_num_threads(1)
    found = {}
    with tempfile.TemporaryDirectory() as folder, ff.use_backend("triton"):
        stand_in.install(Path(folder))
        for op, mode in itertools.product(OPS, MODES):
            found[f"{op}, {mode}"] = measured(op, mode, options.calls, options.rounds)
    if options.write:
        _write(found, options)
    print(json.dumps(found))


def _write(found, options):
    import cpuinfo

    from fastformer.environment import describe

    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    machine = describe(torch.device("cpu")) | {"processor": cpuinfo.get_cpu_info()["brand_raw"]}
    data = dict(
        machine=machine,
        commit=subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip(),
        command=f"python -m benchmarks.bench_host_cost {options.calls} {options.rounds} --write",
        rounds=options.rounds,
        rows={
            name: {key: min(us) if isinstance(us, list) else us for key, us in row.items()}
            for name, row in found.items()
        },
    )
    RESULT.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
