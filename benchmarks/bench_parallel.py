"""Training steps of a decoder on several processes, and attention over sequences that they share:
the time, the memory of a process, and the bytes that it sends beside the fewest that it can.

torchrun starts the processes: 1 and 2 on a CPU (with --slow also 4), over gloo, and as many as
there are GPUs, over NCCL. The batch is the same however many they are, so that `tokens/s` shows how
a way scales. A step is a forward and a backward, without the optimizer, which sends nothing. The
figures are those of rank 0.

`sent_mib` is what the collectives of a step send if each sends as little as it can; gloo may send
more. `least_mib` is, for n processes, P bytes of parameters, of which Q are those of the layers, L
layers, and X bytes of the residual stream [B, S, d]:

    ddp         2 (n-1)/n P                  an all-reduce of the gradients
    fsdp        (n-1)/n (2 P + Q)            all weights once, those of layers again for the
                                             backward, and the gradients
    tensor      (n-1)/n (8 L + 2 + 2/n) X    of each sublayer a gather and a reduction, forward and
                                             backward; of the generator one; the exchange of the
                                             embedding's features for tokens; beside these the
                                             gradients of the vectors of d that all processes have,
                                             and three numbers of each token for the loss
    ring        (n-1)/n (2 K + V)            K: keys and values, once forward and once backward;
                                             V: their gradients, in float32 at least
    all-to-all  (n-1)/n^2 8 R                R: query, as large as key, value and output; each
                                             forward and backward

That of tensor parallelism holds where weights stay where they are: beside many tokens of few
features the weights could be gathered for less. Over gloo it sends (n-1)/n 2 (1 - 1/n) X more,
because DTensor gathers there what NCCL exchanges.

`MiB` is the peak of the memory of a process in a step, above what it holds between two. That of
the ring falls with n at any length, and hardly grows where n doubles with the length. All-to-all
computes some heads of whole sequences: without the kernels, whose memory has no term of S^2, it
takes S^2 / n.
"""

import functools
import json
import statistics
from dataclasses import asdict, replace

import pytest
import torch

from benchmarks.parallel_worker import METHODS, WAYS, Settings
from benchmarks.peers import GPU
from benchmarks.workers import answer

COUNTS = [n for n in (1, 2, 4, 8) if n <= (torch.cuda.device_count() if GPU else 4)]
SETTINGS = Settings()
if GPU:
    SETTINGS = replace(
        SETTINGS, layers=6, d_model=1024, heads=16, batch=32, length=1024, vocab=32000,
        lengths=(4096, 16384, 65536), rounds=10,
    )  # fmt: skip


@functools.cache
def found(processes):
    """The figures of a run on that many processes."""
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes]
    settings = json.dumps(asdict(SETTINGS))
    return answer(*run, "-m", "benchmarks.parallel_worker", settings, OMP_NUM_THREADS="1")


STEPS = [("step", way, SETTINGS.length) for way in WAYS]
ATTENTION = [("attention", method, n) for n in SETTINGS.lengths for method in METHODS]


@pytest.mark.parametrize("what, provider, length", STEPS + ATTENTION)
@pytest.mark.parametrize("processes", COUNTS)
def test_parallel(measure, request, processes, what, provider, length):
    if not GPU and processes > 2 and not request.config.getoption("slow"):
        pytest.skip(f"{processes} processes on a CPU: needs --slow")
    if processes == 1:
        if provider not in (WAYS[0], METHODS[0]):
            pytest.skip("one process shares nothing")
        provider = "alone"
    figures = found(processes)
    one = next(x for x in figures if (x["what"], x["way"], x["length"]) == (what, provider, length))
    s, median = SETTINGS, statistics.median(one["samples"])
    if what == "step":
        group = f"training step of a decoder on {processes} processes"
        tokens = s.batch * s.length
        sizes = dict(batch=s.batch, d_model=s.d_model, layers=s.layers)
    else:
        group = f"attention of a sequence shared by {processes} processes, S={length}"
        tokens, sizes = length, dict(heads=s.heads, head_dim=s.dim)
    measure(
        samples=one["samples"],
        group=group,
        provider=provider,
        backend="triton" if GPU else "reference",
        tokens_per_s=tokens / median,
        peak_mib=one["peak"] / 2**20,
        sent_mib=one["sent"] / 2**20,
        least_mib=one["least"] / 2**20,
        processes=processes,
        **sizes,
    )
