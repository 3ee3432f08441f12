"""The copy task: a Transformer learns to repeat random symbols, on one backend or on both.

It is the first example of the Annotated Transformer, and the end-to-end check of the kernels. With
the same seed both backends start from the same weights, see the same batches and draw the same
dropout masks, so the losses of their first steps have to agree.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from typing import Any

import torch
from tqdm.auto import tqdm

from fastformer.checks import require_size
from fastformer.decoding.search import greedy_decode
from fastformer.dispatch.backends import explain, use_backend
from fastformer.nn.transformer import EncoderDecoder, make_model
from fastformer.training.batches import Batch
from fastformer.training.fit import fit
from fastformer.training.training import LabelSmoothing, SimpleLossCompute, make_optimizer

PAD, START = 0, 1
SMOOTHING = 0.1  # without it the model copies repeated symbols less reliably
DEFAULT_STEPS = 400
INTERPRETED_SECONDS, INTERPRETED_STEPS = 60.0, 3  # of an interpreted run: at most, at least
COMPARED_STEPS, LOSS_TOLERANCE = 20, 1e-4  # later, correct runs diverge by rounding
FINAL_STEPS, FINAL_TOLERANCE = 20, 0.1
MAX_LENGTH = 5000  # positions in the positional encoding of make_model
INTERPRETED_NOTE = (
    "  (Python runs each program of a kernel. To compare the losses, these are the first steps of\n"
    f"  the same run: as many as fit into {{:.0f}} s, and at least {INTERPRETED_STEPS}.\n"
    "  --full trains all of them. The speed says nothing about the kernels.)"
)


@dataclass(frozen=True)
class Settings:
    """The settings of a copy task: the data, the model and the number of steps.

    Raises ValueError or TypeError for a number that is out of range.
    """

    steps: int = DEFAULT_STEPS
    seed: int = 0
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - a value, not a mutable default
    batch: int = 16
    length: int = 10
    vocab: int = 11  # symbols 1 .. vocab - 1, and 0 for padding
    N: int = 2
    d_model: int = 64
    d_ff: int = 256
    h: int = 4
    dropout: float = 0.1
    warmup: int = 200

    def __post_init__(self) -> None:
        require_size(steps=self.steps, batch=self.batch, warmup=self.warmup, N=self.N)
        require_size(d_model=self.d_model, d_ff=self.d_ff, h=self.h)
        require_size(2, length=self.length)
        require_size(3, vocab=self.vocab)
        require_size(0, seed=self.seed)
        if self.length > MAX_LENGTH:
            raise ValueError(f"length is {self.length}; expected at most {MAX_LENGTH}")
        if self.d_model % self.h:
            raise ValueError(f"d_model is {self.d_model}; expected a multiple of h = {self.h}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; expected a number in [0, 1)")

    @property
    def sentence(self) -> list[int]:
        """The symbols to copy after training: 1 3 2 5 4 6 7 8 9 10, cut or repeated to `length`."""
        symbols = [s for s in (1, 3, 2, 5, 4, *range(6, self.vocab)) if s < self.vocab]
        return list(islice(cycle(symbols), self.length))

    def model(self) -> EncoderDecoder:
        """Return the untrained model on the device, initialized from torch's default generator."""
        sizes = self.N, self.d_model, self.d_ff, self.h, self.dropout
        return make_model(self.vocab, self.vocab, *sizes).to(self.device)


def copy_batches(s: Settings) -> Iterator[Batch]:
    """Yield `steps` batches of random symbols. Each sequence begins with 1, and the target is the
    source. A separate generator on the CPU draws the symbols: they are the same on any device.
    """
    generator = torch.Generator().manual_seed(s.seed)
    for _ in range(s.steps):
        symbols = torch.randint(1, s.vocab, (s.batch, s.length), generator=generator)
        symbols[:, 0] = START
        symbols = symbols.to(s.device)
        yield Batch(symbols, symbols, PAD)


@dataclass(frozen=True)
class Run:
    """The result of one backend.

    Attributes:
        losses: the loss per token of each step.
        tokens_per_second: the median over the reports, because the first may include compilation.
        decoded: the decoded sequence with its start symbol; None if not every step was trained.
    """

    backend: str
    interpreted: bool
    losses: list[float]
    tokens_per_second: float
    decoded: list[int] | None

    @property
    def title(self) -> str:
        """The name of the run in a legend."""
        return self.backend + ", interpreted" * self.interpreted


def interpreted(backend: str, device: torch.device) -> bool:
    """Return whether `backend` runs in Triton's interpreter on `device`; raise RuntimeError with
    the reason if it cannot run there.
    """
    with use_backend(backend):
        choice = explain("layer_norm", torch.zeros(1, 8, device=device), 8)
    if choice.backend != "triton":
        return False
    from fastformer.kernels import common

    return common.INTERPRETED


def train(settings: Settings, backend: str, limit: float = INTERPRETED_SECONDS) -> Run:
    """Train a model from `settings.seed`, and decode the sentence before and after. Interpreted
    kernels train as many steps as fit into `limit` seconds, and at least three.

    Raises RuntimeError if the backend cannot run on the device.
    """
    s, is_interpreted = settings, interpreted(backend, settings.device)
    _write(f"\n{backend}" + ", in Triton's interpreter on the CPU" * is_interpreted)
    data: Iterable[Batch] = copy_batches(s)
    if is_interpreted:
        from fastformer.kernels import interpreter

        interpreter.repair()
        if limit < math.inf:
            _write(INTERPRETED_NOTE.format(limit))
            data = _items_within(data, limit, INTERPRETED_STEPS)
    speeds: list[float] = []

    def report(row: dict[str, Any]) -> None:
        loss, speed = row["loss"], row["tokens_per_second"]
        speeds.append(speed)
        bar = "#" * min(40, round(15 * loss)) if math.isfinite(loss) else "not finite"
        _write(f"  step {row['step']:5d}  {speed:9,.0f} tokens/s  loss {loss:7.4f}  {bar}")

    # On a CPU, "auto" would draw other dropout masks than the runs that this one is compared with.
    on_cpu = s.device.type == "cpu"
    with use_backend("reference" if backend == "auto" and on_cpu else backend):
        torch.manual_seed(s.seed)
        model = s.model()
        _write("  untrained: " + _arrow(s, _decode(s, model)))
        optimizer, scheduler = make_optimizer(model.parameters(), s.d_model, warmup=s.warmup)
        started = time.perf_counter()
        criterion = LabelSmoothing(s.vocab, PAD, SMOOTHING)
        losses = fit(
            model, data, optimizer=optimizer, scheduler=scheduler, epochs=1, report=report,
            loss_compute=SimpleLossCompute(model.generator, criterion),
            report_every=1 if is_interpreted else max(1, s.steps // 10),
        ).losses  # fmt: skip
        seconds, speed = time.perf_counter() - started, statistics.median(speeds)
        _write(
            f"  trained {len(losses)} of {s.steps} steps in {seconds:.1f} s, {speed:,.0f} tokens/s"
        )
        decoded = None
        if len(losses) == s.steps:
            decoded = _decode(s, model)
            result = "NOT a copy" if s.steps >= DEFAULT_STEPS else "not a copy yet"
            result = "a copy" if decoded == s.sentence else result
            _write(f"  trained:   {_arrow(s, decoded)}   {result}")
    return Run(backend, is_interpreted, losses, speed, decoded)


def _decode(settings: Settings, model: EncoderDecoder) -> list[int]:
    """Return the model's copy of the sentence."""
    src = torch.tensor([settings.sentence], device=settings.device)
    return greedy_decode(model.eval(), src, None, settings.length, START)[0].tolist()


def _arrow(settings: Settings, decoded: list[int]) -> str:
    return f"{' '.join(map(str, settings.sentence))} -> {' '.join(map(str, decoded))}"


def _write(line: str) -> None:
    tqdm.write(line, file=sys.stdout)  # above the progress bar, if there is one
    sys.stdout.flush()


def _items_within(data: Iterable[Batch], seconds: float, least: int) -> Iterator[Batch]:
    """Yield at least `least` items, then more while the next one, if it takes as long as the
    slowest so far, fits into `seconds`.
    """
    started = last = time.perf_counter()
    slowest = 0.0
    for i, item in enumerate(data):
        now = time.perf_counter()
        slowest, last = max(slowest, now - last), now
        if i >= least and now - started + slowest > seconds:
            return
        yield item


def loss_difference(runs: Sequence[Run]) -> float | None:
    """Return the largest loss difference of two runs over their first 20 common steps, or None
    unless there are two runs.
    """
    if len(runs) != 2:
        return None
    pairs = zip(*(run.losses[:COMPARED_STEPS] for run in runs), strict=False)
    differences = [abs(a - b) for a, b in pairs]
    return math.nan if any(map(math.isnan, differences)) else max(differences, default=None)


def faults(settings: Settings, runs: Sequence[Run]) -> list[str]:
    """Return the faults of the runs, one sentence per fault: a run of the default number of steps
    or more does not copy; the losses of two runs differ by more than 1e-4 in the first 20 steps, or
    by more than 0.1 in the mean of the last 20, if both have the default number of steps or more.
    """
    found = [
        f"{run.backend}: trained {len(run.losses)} steps and does not copy the sequence"
        for run in runs
        if run.decoded not in (None, settings.sentence) and len(run.losses) >= DEFAULT_STEPS
    ]
    first = loss_difference(runs)
    if first is not None and not first <= LOSS_TOLERANCE:
        found.append(
            f"the losses of the backends differ by {first:.1e} in the first {COMPARED_STEPS} "
            f"steps; expected at most {LOSS_TOLERANCE:.0e}"
        )
    if len(runs) == 2 and all(r.decoded and len(r.losses) >= DEFAULT_STEPS for r in runs):
        a, b = (statistics.fmean(r.losses[-FINAL_STEPS:]) for r in runs)
        if not abs(a - b) <= FINAL_TOLERANCE:
            found.append(
                f"the final losses of the backends differ by {abs(a - b):.2g}; "
                f"expected at most {FINAL_TOLERANCE}"
            )
    return found


def verdict(settings: Settings, runs: Sequence[Run]) -> str:
    """Return in one sentence what runs without faults show: that the losses of two runs agree, and
    that the model copies.
    """
    said = ["nothing was compared"]
    difference = loss_difference(runs)
    if difference is not None:
        steps = min(COMPARED_STEPS, *(len(run.losses) for run in runs))
        said = [f"the losses of both runs agree within {difference:.1e} over steps 1..{steps}"]
    for run in runs:
        if run.decoded == settings.sentence:
            end = "copies the sequence"
        elif run.decoded is None:
            end = f"trained {len(run.losses)} of {settings.steps} steps (--full trains all)"
        else:
            end = f"does not copy yet ({DEFAULT_STEPS} steps are enough)"
        said.append(f"{run.title}: {end}")
    return "; ".join(said)


def compare(
    settings: Settings, backends: Sequence[str], limit: float = INTERPRETED_SECONDS
) -> list[Run]:
    """Train on each backend in turn, and print the progress; limit: as in `train`."""
    s = settings
    parameters = sum(p.numel() for p in s.model().parameters())
    print(
        f"Copy task: {s.length} symbols of 1..{s.vocab - 1}, {s.steps} steps of {s.batch} sequences"
        f" on {s.device}, seed {s.seed}\n"
        f"Model: N={s.N}, d_model={s.d_model}, d_ff={s.d_ff}, h={s.h}, dropout={s.dropout};"
        f" {parameters:,} parameters"
    )
    return [train(settings, backend, limit) for backend in backends]


def summary(runs: Sequence[Run], environment: dict[str, Any]) -> dict[str, Any]:
    """Return the content of the --json file; max_loss_difference is over the first 20 steps, and
    None for a single run. A loss that is not finite is None.
    """

    def finite(x: float | None) -> float | None:
        return x if x is not None and math.isfinite(x) else None

    return {
        "runs": [asdict(run) | {"losses": [finite(x) for x in run.losses]} for run in runs],
        "max_loss_difference": finite(loss_difference(runs)),
        "environment": environment,
    }
