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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from fastformer.cache.decoder import DecoderCache
from fastformer.checks import require_positive, require_size
from fastformer.decoding.search import greedy_decode
from fastformer.dispatch.backends import explain, use_backend
from fastformer.nn.attention import MultiHeadedAttention
from fastformer.nn.transformer import EncoderDecoder, make_model
from fastformer.training.batches import Batch
from fastformer.training.checkpoints import Checkpoints
from fastformer.training.fit import fit
from fastformer.training.training import LabelSmoothing, SimpleLossCompute, make_optimizer

PAD, START = 0, 1
DEFAULT_STEPS = 400
INTERPRETED_SECONDS, INTERPRETED_STEPS = 60.0, 3  # of an interpreted run: at most, at least
COMPARED_STEPS, LOSS_TOLERANCE = 20, 1e-4  # later, correct runs diverge by rounding
FINAL_STEPS, FINAL_TOLERANCE = 20, 0.1
DECODED_TOKENS = 256  # decoded to measure the speed
MAX_LENGTH = 5000  # positions in the positional encoding of make_model

T = TypeVar("T")


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
    factor: float = 1.0
    smoothing: float = 0.1  # with 0 the model copies repeated symbols less reliably

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
        for name in ("dropout", "smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a number in [0, 1)")
        require_positive("factor", self.factor)

    @property
    def plain(self) -> dict[str, Any]:
        """The settings by name, without the device."""
        return {name: x for name, x in vars(self).items() if name != "device"}

    @property
    def sentence(self) -> list[int]:
        """The symbols to copy after training: 1 3 2 5 4 6 7 8 9 10, cut or repeated to `length`."""
        symbols = [s for s in (1, 3, 2, 5, 4, *range(6, self.vocab)) if s < self.vocab]
        return list(islice(cycle(symbols), self.length))

    def model(self) -> EncoderDecoder:
        """Return the untrained model on the device, initialized from torch's default generator."""
        model = make_model(
            self.vocab, self.vocab, self.N, self.d_model, self.d_ff, self.h, self.dropout
        )
        return model.to(self.device)


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
        tokens_per_second: the median over the reports, because the first may include compilation;
            nan if the checkpoint already had every step.
        decoded: the decoded sequence with its start symbol; None if not every step was trained.
        decoding: tokens per second of greedy decoding, with a cache and without one; None for
            interpreted kernels, if `OneProcess.timed` is False, or if not every step was trained.
        parallel: how several processes trained it; None for one process.
    """

    backend: str
    interpreted: bool
    losses: list[float]
    tokens_per_second: float
    decoded: list[int] | None
    decoding: tuple[float, float] | None = None
    parallel: str | None = None

    @property
    def title(self) -> str:
        """The name of the run in a legend."""
        parallel = "" if self.parallel is None else f", {self.parallel}"
        return self.backend + parallel + ", interpreted" * self.interpreted


def interpreted(backend: str, device: torch.device) -> bool:
    """Return whether `backend` runs in Triton's interpreter on `device`.

    Raises RuntimeError with the reason if the backend cannot run there.
    """
    with use_backend(backend):
        choice = explain("layer_norm", torch.zeros(1, 8, device=device), 8)
    if choice.backend != "triton":
        return False
    from fastformer.kernels import common

    return common.INTERPRETED


class OneProcess:
    """How the model is trained: here, in one process.

    `parallel_copy_task.Parallel` trains with several processes. name: a suffix for the
    printed title of the run. checkpoints: where they are saved, or None. timed: whether the speed
    of decoding is measured.
    """

    name = ""

    def __init__(self, checkpoints: Checkpoints | None = None, timed: bool = True) -> None:
        self.checkpoints, self.timed = checkpoints, timed
        self.losses: Sequence[Tensor] = []  # of every step so far
        self.write: Callable[[str], object] = _write_line

    def place(self, model: EncoderDecoder) -> nn.Module:
        """Return the module to train: the model, or a wrapper or sharded version of it."""
        self.model = model
        return model

    def begin(self, *state: Any, **options: Any) -> tuple[int, list[Tensor]]:
        """Begin as `Checkpoints.begin` does, from the checkpoint, if there is one."""
        if self.checkpoints is None:
            return 0, []
        done, losses = self.checkpoints.begin(*state, **options)
        if done:
            self.write(f"  resumes from {self.checkpoints.resumed_from}, after {done} steps")
        self.losses = losses
        return done, losses

    def end_step(self, losses: Sequence[Tensor], last: bool = False, stop: bool = False) -> bool:
        """Save a checkpoint if one is due, as `Checkpoints.end_step` does."""
        self.losses = losses
        return stop if self.checkpoints is None else self.checkpoints.end_step(losses, last, stop)

    def local_batch(self, batch: Batch) -> Batch:
        """Return the local shard of a batch, which this process computes."""
        return batch

    def sequences(self) -> AbstractContextManager[None]:
        """Return a context that tells the ops which shard of a batch is local."""
        return nullcontext()

    def gathered(self, model: nn.Module, settings: Settings) -> EncoderDecoder:
        """Return an unsharded model with the trained parameters."""
        return self.model


def train(
    settings: Settings,
    backend: str,
    limit: float = INTERPRETED_SECONDS,
    verbose: bool = True,
    trainer: OneProcess | None = None,
) -> Run:
    """Train a model from `settings.seed`, and decode the sentence before and after training.

    Interpreted kernels train as many steps as fit into `limit` seconds, and at least three. Raises
    RuntimeError if the backend cannot run on the device.
    """
    trainer, is_interpreted = trainer or OneProcess(), interpreted(backend, settings.device)
    write = trainer.write = _write_line if verbose else (lambda line: None)
    where = ", in Triton's interpreter on the CPU" if is_interpreted else ""
    write(f"\n{backend}{trainer.name}{where}")
    data: Iterable[Batch] = copy_batches(settings)
    if is_interpreted:
        data = _interpreted_steps(data, limit, write)

    # On a CPU, "auto" would draw other dropout masks than the runs that this one is compared with.
    on_cpu = settings.device.type == "cpu"
    with use_backend("reference" if backend == "auto" and on_cpu else backend):
        torch.manual_seed(settings.seed)
        model = settings.model()
        write("  untrained: " + _arrow(settings, _decode(settings, model.eval())))
        placed = trainer.place(model.train())
        optimizer, scheduler = make_optimizer(
            placed.parameters(), settings.d_model, settings.factor, settings.warmup
        )
        criterion = LabelSmoothing(settings.vocab, PAD, settings.smoothing)
        compute, rows = SimpleLossCompute(model.generator, criterion), []
        started, decoded, decoding = time.perf_counter(), None, None

        def report(row: dict[str, Any]) -> None:
            rows.append(row)
            loss = row["loss"]
            bar = "#" * min(40, round(15 * loss)) if math.isfinite(loss) else "not finite"
            speed = f"{row['tokens_per_second']:9,.0f} tokens/s"
            write(f"  step {row['step']:5d}  {speed}  loss {loss:7.4f}  {bar}")

        def speed() -> float:
            return statistics.median([row["tokens_per_second"] for row in rows] or [math.nan])

        with trainer.sequences():
            fit(
                placed,
                map(trainer.local_batch, data),
                optimizer=optimizer,
                scheduler=scheduler,
                loss_compute=compute,
                epochs=1,
                checkpoints=trainer,  # type: ignore[arg-type]  # it has begin and end_step
                report=report,
                report_every=1 if is_interpreted else max(1, settings.steps // 10),
                progress=None if verbose else False,
            )
        trained, seconds = len(trainer.losses), time.perf_counter() - started
        write(
            f"  trained {trained} of {settings.steps} steps in {seconds:.1f} s, "
            f"{speed():,.0f} tokens/s"
        )
        model = trainer.gathered(placed, settings)
        if trained == settings.steps:
            timed = trainer.timed and not is_interpreted
            decoded, decoding = _decoded(settings, model, timed, write)
    losses, parallel = [float(x) for x in trainer.losses], trainer.name.removeprefix(", ") or None
    return Run(backend, is_interpreted, losses, speed(), decoded, decoding, parallel)


def _interpreted_steps(
    data: Iterable[Batch], limit: float, write: Callable[[str], None]
) -> Iterable[Batch]:
    """Return the batches that Triton's interpreter trains: as many as fit into `limit` seconds."""
    from fastformer.kernels import interpreter

    interpreter.repair()
    if limit == math.inf:
        return data
    write(_INTERPRETED_NOTE.format(limit))
    return _items_within(data, limit, INTERPRETED_STEPS)


_INTERPRETED_NOTE = (
    "  (Python runs each program of a kernel. To compare the losses, these are the first steps of\n"
    f"  the same run: as many as fit into {{:.0f}} s, and at least {INTERPRETED_STEPS}.\n"
    "  --full trains all of them. The speed says nothing about the kernels.)"
)


def _decoded(
    settings: Settings, model: EncoderDecoder, timed: bool, write: Callable[[str], None]
) -> tuple[list[int], tuple[float, float] | None]:
    """Return the decoded sentence, and the speeds of decoding if `timed`."""
    decoded = _decode(settings, model.eval())
    result = "NOT a copy" if settings.steps >= DEFAULT_STEPS else "not a copy yet"
    result = "a copy" if decoded == settings.sentence else result
    write(f"  trained:   {_arrow(settings, decoded)}   {result}")
    if not timed:
        return decoded, None
    kept, again = decoding = _decoding_speeds(settings, model)
    write(
        f"  decoding:  {kept:,.0f} tokens/s with a cache, {again:,.0f} without, over "
        f"{DECODED_TOKENS} tokens"
    )
    return decoded, decoding


def attention_maps(
    settings: Settings, backend: str = "auto"
) -> tuple[dict[str, Tensor], list[int] | None]:
    """Train a model, and return {attention's name: weights [h, T, S]} of a copy of the sentence,
    and what the model decodes from it.

    The decoder reads the sentence without its last symbol, and predicts it without its first.
    """
    trainer = OneProcess(timed=False)
    run = train(settings, backend, trainer=trainer)
    model = trainer.model.eval()
    layers = attentions(model)
    for layer in layers.values():
        layer.keep_attention = True
    sentence = torch.tensor([settings.sentence], device=settings.device)
    batch = Batch(sentence, sentence, PAD)
    with torch.no_grad(), use_backend(backend):
        model(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)
    maps = {name: layer.attn[0] for name, layer in layers.items() if layer.attn is not None}
    return maps, run.decoded


def attentions(model: nn.Module) -> dict[str, MultiHeadedAttention]:
    """Return the attention layers of a model by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, MultiHeadedAttention)}


def _decode(settings: Settings, model: EncoderDecoder, length: int = 0, cache: Any = True) -> Any:
    """Return `length` tokens of the copy of the sentence, by default all."""
    src = torch.tensor([settings.sentence], device=settings.device)
    tokens = greedy_decode(model, src, None, length or settings.length, START, cache=cache)
    return tokens[0].tolist()


def _decoding_speeds(settings: Settings, model: EncoderDecoder) -> tuple[float, float]:
    """Return the tokens per second of greedy decoding, with a cache and without one."""
    speeds = []
    for cache in (DecoderCache(DECODED_TOKENS), False):
        for length in (3, DECODED_TOKENS):  # the short run compiles the kernels
            started = time.perf_counter()
            _decode(settings, model, length, cache)
            seconds = time.perf_counter() - started
        speeds.append((DECODED_TOKENS - 1) / seconds)
    return speeds[0], speeds[1]


def _arrow(settings: Settings, decoded: list[int]) -> str:
    return f"{' '.join(map(str, settings.sentence))} -> {' '.join(map(str, decoded))}"


def _write_line(line: str) -> None:
    tqdm.write(line, file=sys.stdout)  # above the progress bar, if there is one
    sys.stdout.flush()


def _items_within(data: Iterable[T], seconds: float, least: int) -> Iterator[T]:
    """Yield at least `least` items, then more while the next fits into `seconds`.

    The next item is expected to take as long as the slowest so far.
    """
    started = last = time.perf_counter()
    slowest = 0.0
    for i, item in enumerate(data):
        now = time.perf_counter()
        slowest, last = max(slowest, now - last), now
        if i >= least and now - started + slowest > seconds:
            return
        yield item


def loss_difference(runs: Sequence[Run], steps: int = COMPARED_STEPS) -> float | None:
    """Return the largest loss difference of two runs over their first `steps` common steps.

    Return None unless there are two runs.
    """
    if len(runs) != 2:
        return None
    pairs = zip(runs[0].losses[:steps], runs[1].losses[:steps], strict=False)
    differences = [abs(a - b) for a, b in pairs]
    return math.nan if any(map(math.isnan, differences)) else max(differences, default=None)


def _final_difference(runs: Sequence[Run]) -> float | None:
    """Return the difference between two runs of the mean loss of their last 20 steps.

    Return None unless there are two runs, both complete with the default number of steps or more.
    """
    if len(runs) != 2 or any(r.decoded is None or len(r.losses) < DEFAULT_STEPS for r in runs):
        return None
    a, b = (statistics.fmean(r.losses[-FINAL_STEPS:]) for r in runs)
    return abs(a - b)


def faults(settings: Settings, runs: Sequence[Run]) -> list[str]:
    """Return the faults of the runs, one sentence per fault.

    The faults are: a run with the default number of steps or more does not copy; the losses of the
    two backends differ by more than 1e-4 in the first 20 steps; the final losses differ by more
    than 0.1, if both runs have the default number of steps or more.
    """
    found = [
        f"{run.backend}: trained {len(run.losses)} steps and does not copy the sequence"
        for run in runs
        if run.decoded not in (None, settings.sentence) and len(run.losses) >= DEFAULT_STEPS
    ]
    first, final = loss_difference(runs), _final_difference(runs)
    if first is not None and not first <= LOSS_TOLERANCE:
        found.append(
            f"the losses of the backends differ by {first:.1e} in the first {COMPARED_STEPS} "
            f"steps; expected at most {LOSS_TOLERANCE:.0e}"
        )
    if final is not None and not final <= FINAL_TOLERANCE:
        found.append(
            f"the final losses of the backends differ by {final:.2g}; "
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
        if run.parallel != runs[-1].parallel:
            continue  # the few steps in one process
        if run.decoded == settings.sentence:
            end = "copies the sequence"
        elif run.decoded is None:
            end = f"trained {len(run.losses)} of {settings.steps} steps (--full trains all)"
        else:
            end = f"does not copy yet ({DEFAULT_STEPS} steps are enough)"
        said.append(f"{run.title}: {end}")
    return "; ".join(said)


def compare(
    settings: Settings,
    backends: Sequence[str],
    checkpoints: Path | None = None,
    limit: float = INTERPRETED_SECONDS,
) -> list[Run]:
    """Train on each backend in turn, and print the progress and the comparison.

    checkpoints: the folder of the run's checkpoints, which has one for each backend if there are
    several; None for none. limit: as in `train`.
    """
    s = settings
    parameters = sum(p.numel() for p in s.model().parameters())
    print(
        f"Copy task: {s.length} symbols of 1..{s.vocab - 1}, {s.steps} steps of {s.batch} sequences"
        f" on {s.device}, seed {s.seed}\n"
        f"Model: N={s.N}, d_model={s.d_model}, d_ff={s.d_ff}, h={s.h}, dropout={s.dropout};"
        f" {parameters:,} parameters"
    )
    runs: list[Run] = []
    for backend in backends:
        trainer = OneProcess()
        if checkpoints is not None:
            folder = checkpoints / backend if len(backends) > 1 else checkpoints
            trainer = OneProcess(Checkpoints(folder, settings.plain))
        runs.append(train(settings, backend, limit=limit, trainer=trainer))
    difference = loss_difference(runs)
    if difference is not None:
        common = min(len(run.losses) for run in runs)
        compared = min(common, COMPARED_STEPS)
        print(
            f"\nLargest loss difference between {runs[0].backend} and {runs[1].backend} "
            f"over steps 1..{compared}: {difference:.1e} (at most {LOSS_TOLERANCE:.0e})"
        )
        if common > compared:
            total = loss_difference(runs, common)
            print(f"Over all {common} common steps, which diverge by rounding: {total:.1e}")
        final = _final_difference(runs)
        if final is not None:
            print(f"Difference of the final losses: {final:.1e} (at most {FINAL_TOLERANCE})")
    return runs


def summary(runs: Sequence[Run], environment: dict[str, Any]) -> dict[str, Any]:
    """Return the content of the --json file.

    max_loss_difference is over the first 20 steps, and None for a single run. A loss that is not
    finite is None.
    """
    listed = [asdict(run) for run in runs]
    for run in listed:
        run["losses"] = [_finite(x) for x in run["losses"]]
        run["tokens_per_second"] = _finite(run["tokens_per_second"])
    return {
        "runs": listed,
        "max_loss_difference": _finite(loss_difference(runs)),
        "environment": environment,
    }


def _finite(x: float | None) -> float | None:
    return x if x is not None and math.isfinite(x) else None
