"""Batch, LabelSmoothing, the schedule and run_epoch, against the tutorials' formulas."""

import contextlib
import copy
import math
import pickle
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data._utils import pin_memory

from fastformer import (
    Batch,
    Generator,
    LabelSmoothing,
    Packing,
    SimpleLossCompute,
    make_model,
    make_optimizer,
    rate,
    run_epoch,
)
from fastformer.training import training

# -------------------------------------------------------------------------------------------- Batch


def test_a_batch_on_another_device_and_in_print():
    batch = Batch(torch.ones(2, 4, dtype=torch.long), torch.ones(2, 3, dtype=torch.long))
    moved = batch.to("meta")
    before, after = dict(vars(batch)), dict(vars(moved))
    assert before.pop("pad") == after.pop("pad") == 0 and before.keys() == after.keys()
    assert all(x.is_meta for x in after.values()) and not any(x.is_meta for x in before.values())
    assert repr(batch) == "Batch(src=[2, 4], tgt=[2, 2], device=cpu)"
    assert repr(Batch(batch.src).to("meta")) == "Batch(src=[2, 4], tgt=None, device=meta)"


@pytest.mark.parametrize("packed", [False, True])
def test_a_batch_in_pinned_memory(packed, monkeypatch):
    """A DataLoader with pin_memory=True calls the method, which pins every tensor."""
    pinned = []

    def pin(x, *device):
        pinned.append(x.clone())
        return pinned[-1]

    def tensors(batch):
        packings = {n: x for n, x in vars(batch).items() if isinstance(x, Packing)}
        found = {n: x for n, x in vars(batch).items() if n not in {"pad", *packings}}
        for name, x in packings.items():
            found |= {(name, "cu_seqlens"): x.cu_seqlens, (name, "indices"): x.indices}
        return found

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    ids = torch.tensor([[1, 5, 2, 0], [1, 2, 0, 0]])
    batch = Batch(ids, ids, packed=packed)
    have = pin_memory.pin_memory(batch)  # what the DataLoader does to what it has loaded
    assert type(have) is Batch and have.pad == batch.pad == 0
    before, after = tensors(batch), tensors(have)
    assert before.keys() == after.keys() and len(after) == (8 if packed else 6)
    assert all(torch.equal(x, after[name]) for name, x in before.items())
    assert {id(x) for x in after.values()} == {id(x) for x in pinned}
    assert Batch(ids).pin_memory().tgt is None


def test_batch_splits_the_target_and_masks_padding_and_future(device):
    src = torch.tensor([[1, 5, 2, 0], [1, 2, 0, 0]], device=device)
    tgt = torch.tensor([[1, 7, 8, 9], [1, 7, 0, 0]], device=device)
    batch = Batch(src, tgt)
    assert batch.src is src
    assert batch.src_mask.tolist() == [[[True, True, True, False]], [[True, True, False, False]]]
    assert batch.tgt.tolist() == [[1, 7, 8], [1, 7, 0]]
    assert batch.tgt_y.tolist() == [[7, 8, 9], [7, 0, 0]]
    assert int(batch.ntokens) == 4
    assert batch.tgt_mask.int().tolist() == [
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]],
        [[1, 0, 0], [1, 1, 0], [1, 1, 0]],
    ]
    assert batch.src_mask.dtype == batch.tgt_mask.dtype == torch.bool
    assert batch.tgt_mask.device == src.device
    alone = Batch(torch.tensor([[0, 3, 2]]), pad=2)
    assert alone.src_mask.tolist() == [[[True, True, False]]]
    assert alone.tgt is alone.tgt_y is alone.tgt_mask is alone.ntokens is None


ids = torch.ones(2, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((ids, ids.bool()), TypeError, "tgt has dtype torch.bool"),
        ((ids, ids[:1]), ValueError, r"tgt \[1, 4\]; expected the batch of src \[2, 4\]"),
        ((ids, ids[:, :1]), ValueError, r"tgt has shape \[2, 1\]; expected two columns or more"),
    ],
)
def test_batch_names_what_is_wrong(arguments, error, message):
    with pytest.raises(error, match=message):
        Batch(*arguments)


# ---------------------------------------------------------------------------------- LabelSmoothing


def smoothed(x, target, size, padding_idx, smoothing):
    """The Annotated Transformer's LabelSmoothing.forward: (loss, the smoothed targets)."""
    true_dist = x.data.clone()
    true_dist.fill_(smoothing / (size - 2))
    true_dist.scatter_(1, target.data.unsqueeze(1), 1.0 - smoothing)
    true_dist[:, padding_idx] = 0
    mask = torch.nonzero(target.data == padding_idx)
    if mask.dim() > 0:
        true_dist.index_fill_(0, mask.squeeze(-1), 0.0)
    return nn.KLDivLoss(reduction="sum")(x, true_dist), true_dist


@pytest.mark.parametrize("padding_idx", [0, 2, 6])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_label_smoothing_is_the_tutorials(smoothing, padding_idx, device):
    size, rows = 7, 12
    logits = torch.randn(rows, size, dtype=torch.float64, device=device, requires_grad=True)
    target = torch.arange(rows, device=device) % size
    criterion = LabelSmoothing(size, padding_idx, smoothing)
    loss = criterion(logits.log_softmax(-1), target)
    expected, true_dist = smoothed(logits.log_softmax(-1), target, size, padding_idx, smoothing)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(criterion.true_dist.double(), true_dist)
    torch.testing.assert_close(
        *(torch.autograd.grad(value, logits)[0] for value in (loss, expected))
    )


def test_label_smoothing_reads_neither_padding_rows_nor_the_padding_column():
    x, target = torch.randn(4, 6).log_softmax(-1), torch.tensor([1, 0, 3, 0])
    criterion = LabelSmoothing(6, 0, 0.2)
    clean = criterion(x, target)
    x[1], x[3], x[:, 0] = math.nan, -math.inf, -math.inf
    torch.testing.assert_close(criterion(x, target), clean)


def test_label_smoothing_takes_leading_dimensions_and_sums_low_precision_in_float32():
    x, target = torch.randn(8, 50, 6).log_softmax(-1), torch.randint(6, (8, 50))
    criterion = LabelSmoothing(6, 0, 0.2)
    whole = criterion(x, target)
    torch.testing.assert_close(whole, criterion(x.flatten(0, 1), target.flatten()))
    half = criterion(x.bfloat16(), target)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, criterion(x.bfloat16().float(), target))
    assert criterion(x, target.to(torch.int32)) == whole
    assert criterion(x[:0], target[:0]) == 0
    copied = pickle.loads(pickle.dumps(copy.deepcopy(criterion)))
    torch.testing.assert_close(copied(x, target), whole)
    certain = torch.tensor([[0.0, 1.0, 0.0]]).log()  # -inf is a log-probability
    assert LabelSmoothing(3, 0)(certain, torch.tensor([1])) == 0


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("padding_idx", [None, -100, 2])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_label_smoothing_with_weights_and_without_padding(smoothing, padding_idx, weighted):
    """Its own formula, `linear_cross_entropy` for it, and the table of its targets."""
    weight = torch.rand(7) + 0.2 if weighted else None
    target = torch.arange(12) % 7
    if padding_idx == -100:
        target[3::4] = -100
    generator = Generator(5, 7)
    criterion = LabelSmoothing(7, padding_idx, smoothing, weight=weight)
    x = torch.randn(1, 12, 5)
    logp = generator(x).view(12, 7)
    loss = criterion(logp, target)
    t = criterion.true_dist
    kept = target != (-1 if padding_idx is None else padding_idx)
    torch.testing.assert_close(t.sum(1), kept.float())
    assert len(t[0].unique()) == (1 + (padding_idx == 2) + (smoothing > 0) if smoothing else 2)
    terms = torch.special.xlogy(t, t) - t * logp
    torch.testing.assert_close(loss, ((1.0 if weight is None else weight) * terms).sum())
    compute = SimpleLossCompute(generator, criterion)
    torch.testing.assert_close(compute(x, target.view(1, 12), 12), loss / 12)
    z = torch.tensor(0.5) * generator.proj(x).logsumexp(-1)[0].square()[kept].sum()
    compute = SimpleLossCompute(generator, criterion, z_loss=0.5)
    torch.testing.assert_close(compute(x, target.view(1, 12), 12), (loss + z) / 12)
    assert criterion.to(torch.float64).weight is None or criterion.weight.dtype == torch.float64


def test_z_loss_needs_the_logits():
    x, y = torch.randn(1, 3, 5), torch.tensor([[1, 2, 3]])
    compute = SimpleLossCompute(lambda x: x.log_softmax(-1), LabelSmoothing(5, 0), z_loss=0.1)
    with pytest.raises(ValueError, match=r"z_loss is 0.1; expected 0, or a Generator and a Label"):
        compute(x, y, 3)
    for z_loss, error in ((-1.0, ValueError), (math.inf, ValueError), ("no", TypeError)):
        with pytest.raises(error, match="z_loss is "):
            SimpleLossCompute(Generator(5, 5), LabelSmoothing(5, 0), z_loss=z_loss)


LOGP, TARGET = torch.zeros(2, 5).log_softmax(-1), torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: LabelSmoothing(2, 0), ValueError, "size is 2; expected 3 or more"),
        (lambda: LabelSmoothing(1, None), ValueError, "size is 1; expected 2 or more"),
        (lambda: LabelSmoothing(5, 5), ValueError, "padding_idx is 5; expected a class from 0 to"),
        (lambda: LabelSmoothing(5, 0, 1.0), ValueError, "smoothing is 1.0; expected"),
        (lambda: LabelSmoothing(5, 0, weight=torch.ones(4)), ValueError,
         r"weight has shape \[4\]; expected \[size\] = \[5\]"),
        (lambda: LabelSmoothing(5, 0)(LOGP[:, :4], TARGET), ValueError, r"x has shape \[2, 4\]"),
        (lambda: LabelSmoothing(5, 0)(LOGP, TARGET[:1]), ValueError, r"target has shape \[1\]"),
        (lambda: LabelSmoothing(5, None)(LOGP, TARGET - 101), ValueError, "target holds -100"),
        (lambda: LabelSmoothing(5, -100)(LOGP, TARGET - 2), ValueError, "target holds -1"),
        # Of logits the loss could be negative.
        (lambda: LabelSmoothing(5, 0)(LOGP + 3, TARGET), ValueError,
         r"x holds .*; expected log-probabilities, none above 0"),
        (lambda: LabelSmoothing(5, 0)((LOGP + 3).requires_grad_(), TARGET), ValueError,
         "expected log-probabilities"),
        (lambda: rate(1, 0, 1.0, 4), ValueError, "model_size is 0; expected 1 or more"),
        (lambda: rate(1, 16, 1.0, 0), ValueError, "warmup is 0; expected 1 or more"),
        (lambda: make_optimizer([nn.Parameter(torch.zeros(1))], 16, 1.0, 0), ValueError,
         "warmup is 0"),
        (lambda: make_optimizer([nn.Parameter(torch.zeros(1))], 16, lr=1e-3), TypeError,
         r"lr is no argument here; expected factor, .* or torch.optim.Adam"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


# ------------------------------------------------------------------------------------ the schedule


def test_rate_by_hand():
    # d = 16: d^-0.5 = 1/4. Warm-up 4: warmup^-1.5 = 1/8.
    assert rate(1, 16, 1.0, 4) == pytest.approx(1 / 4 * 1 / 8)
    assert rate(2, 16, 1.0, 4) == pytest.approx(1 / 4 * 2 / 8)
    assert rate(4, 16, 1.0, 4) == pytest.approx(1 / 4 * 1 / 2)  # the peak: step^-0.5 meets it
    assert rate(16, 16, 1.0, 4) == pytest.approx(1 / 4 * 1 / 4)
    assert rate(100, 16, 2.0, 4) == pytest.approx(2 / 4 * 1 / 10)
    assert rate(0, 16, 1.0, 4) == rate(1, 16, 1.0, 4)


def test_make_optimizer_gives_update_n_the_rate_of_step_n():
    weight = nn.Parameter(torch.zeros(1))
    optimizer, scheduler = make_optimizer([weight], 16, 0.5, 3)
    assert optimizer.defaults["betas"] == (0.9, 0.98)
    assert optimizer.defaults["eps"] == 1e-9
    used = []
    for _ in range(7):
        used.append(optimizer.param_groups[0]["lr"])
        weight.grad = torch.ones(1)
        optimizer.step()
        scheduler.step()
    assert used == pytest.approx([rate(n, 16, 0.5, 3) for n in range(1, 8)])
    # Under a constant gradient Adam moves by the rate.
    assert weight.item() == pytest.approx(-sum(used))


def test_make_optimizer_takes_the_fused_form_where_it_can():
    weights = [nn.Parameter(torch.linspace(-1, 1, 7)) for _ in range(2)]
    fused, _ = make_optimizer([dict(params=[weights[0]], weight_decay=0.1)], 16, warmup=2)
    plain = torch.optim.Adam([weights[1]], 1.0, (0.9, 0.98), 1e-9, weight_decay=0.1, fused=False)
    plain.param_groups[0]["lr"] = fused.param_groups[0]["lr"]
    assert fused.defaults["fused"] and fused.param_groups[0]["fused"]
    for n in range(1, 4):
        for weight, optimizer in zip(weights, (fused, plain)):
            weight.grad = torch.linspace(-2, 3, 7) * n
            optimizer.step()
    torch.testing.assert_close(*weights)
    for other in (
        nn.Parameter(torch.zeros(1, device="meta")),
        nn.Parameter(torch.ones(1).cfloat()),
    ):
        assert not make_optimizer([weights[0], other], 16)[0].defaults["fused"]


# --------------------------------------------------------------------------------------- the epoch


class Echo(nn.Module):
    """A model that gives each target token its own row of weights, whatever the source."""

    def __init__(self, vocab):
        super().__init__()
        self.rows = nn.Embedding(vocab, vocab)

    def forward(self, src, tgt, src_mask, tgt_mask):
        assert src_mask.shape[1] == 1 and tgt_mask.shape[1:] == (tgt.shape[1],) * 2
        self.with_gradients = torch.is_grad_enabled()
        return self.rows(tgt)


def some_batches(n=5):
    generator = torch.Generator().manual_seed(3)
    for i in range(n):
        x = torch.randint(1, 7, (4, 6), generator=generator)
        x[: i % 4, 3:] = 0  # batches of different token counts
        yield Batch(x, x)


def echo_loss():
    return SimpleLossCompute(lambda x: x.log_softmax(-1), LabelSmoothing(7, 0, 0.1))


@pytest.mark.parametrize(
    ("criterion", "reduction"),
    [(nn.CrossEntropyLoss(), "mean"), (nn.NLLLoss(reduction="none"), "none"),
     (nn.KLDivLoss(reduction="batchmean"), "batchmean")],
)  # fmt: skip
def test_a_criterion_that_does_not_sum_is_refused(criterion, reduction):
    message = rf"criterion is a {type(criterion).__name__} with reduction '{reduction}'; expected"
    with pytest.raises(ValueError, match=message + " 'sum', because the loss is divided by norm"):
        SimpleLossCompute(Generator(5, 7), criterion)


def test_a_criterion_of_torch_that_sums(device):
    """By a `Generator` and by another function."""
    x, y = torch.randn(2, 3, 5, device=device), torch.tensor([[1, 2, 0], [6, 0, 0]], device=device)
    generator = Generator(5, 7).to(device)
    logits = x.double() @ generator.proj.weight.double().T + generator.proj.bias.double()
    rows = logits.logsumexp(-1) - logits.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    want = rows[y != 0].sum() / 3
    for given in (generator, lambda x: generator(x)):
        compute = SimpleLossCompute(given, nn.NLLLoss(reduction="sum", ignore_index=0))
        for ntokens in (3, (y != 0).sum()):
            torch.testing.assert_close(compute(x, y, ntokens).double(), want, rtol=1e-5, atol=1e-5)


def test_run_epoch_evaluates_per_token_without_gradients_or_changes():
    model = Echo(7)
    before = copy.deepcopy(model.state_dict())
    compute = echo_loss()
    total = tokens = 0
    for batch in some_batches():
        output = model(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)
        total += compute(output, batch.tgt_y, 1).item()
        tokens += int(batch.ntokens)
    assert len({int(b.ntokens) for b in some_batches()}) > 1  # per token is not per batch
    loss = run_epoch(some_batches(), model, compute, report_every=2)
    assert loss == pytest.approx(total / tokens, rel=1e-5)
    torch.testing.assert_close(dict(model.state_dict()), dict(before))
    assert not model.with_gradients and torch.is_grad_enabled()


def test_run_epoch_trains_as_a_loop_written_out_does():
    model = Echo(7)
    twin = copy.deepcopy(model)
    optimizer, scheduler = make_optimizer(model.parameters(), 16, 1.0, 4)
    with torch.no_grad():  # an optimizer asks for gradients, whatever surrounds the call
        run_epoch(some_batches(), model, echo_loss(), optimizer, scheduler)

    optimizer, scheduler = make_optimizer(twin.parameters(), 16, 1.0, 4)
    compute = echo_loss()
    for batch in some_batches():
        optimizer.zero_grad()
        compute(
            twin(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask), batch.tgt_y, batch.ntokens
        ).backward()
        optimizer.step()
        scheduler.step()
    torch.testing.assert_close(dict(model.state_dict()), dict(twin.state_dict()), rtol=0, atol=0)


def trained(model, batches, **options):
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 3)
    loss = run_epoch(batches, model, echo_loss(), optimizer, scheduler, **options)
    return loss, dict(model.state_dict()), scheduler.last_epoch


def joined(batches):
    return Batch(torch.cat([b.src for b in batches]), torch.cat([b.src for b in batches]))


def test_accumulation_steps_are_one_batch(capsys):
    """Of batches with different numbers of tokens, and of the group that is left."""
    model, batches, reported = Echo(7), list(some_batches(5)), []
    twin, alone = copy.deepcopy(model), copy.deepcopy(model)
    loss, have, updates = trained(
        model, batches, accumulation_steps=3, report=lambda *x: reported.append(x[0]),
        report_every=2,
    )  # fmt: skip
    want_loss, want, _ = trained(twin, [joined(batches[:3]), joined(batches[3:])])
    assert updates == 2 and reported == [2, 4, 5]
    torch.testing.assert_close(have, want)
    assert loss == pytest.approx(want_loss)
    _, other, _ = trained(alone, batches)
    assert (other["rows.weight"] - want["rows.weight"]).abs().max() > 1e-3


def test_a_batch_of_padding_alone_adds_nothing():
    model, batches = Echo(7), list(some_batches(2))
    twin, x = copy.deepcopy(model), batches[0].src
    empty = Batch(x, torch.zeros_like(x))
    _, have, _ = trained(model, [batches[0], empty], accumulation_steps=2)
    torch.testing.assert_close(have, trained(twin, batches[:1])[1])
    model = nn.Sequential(model, Generator(7, 7))  # whose backward multiplies zeros by the share
    before = copy.deepcopy(model.state_dict())
    compute = SimpleLossCompute(model[1], LabelSmoothing(7, 0, 0.1))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    run_epoch([empty, empty], model[0], compute, optimizer, None, accumulation_steps=2)
    torch.testing.assert_close(model.state_dict(), before)


def test_no_sync_but_for_the_last_of_the_accumulation_steps():
    """As DistributedDataParallel does, whose no_sync surrounds forward and backward."""
    model, calls, batches = Echo(7), [], list(some_batches(3))

    @contextlib.contextmanager
    def no_sync():
        calls.append("begin")
        yield
        calls.append("end")

    model.no_sync = no_sync
    model.rows.weight.register_hook(lambda g: calls.append("backward"))
    trained(model, batches, accumulation_steps=2)
    assert calls == ["begin", "backward", "end", "backward", "backward"]


@pytest.mark.parametrize("most", [0.01, 1e3])
def test_max_grad_norm_clips_the_gradients(most):
    model = Echo(7)
    twin, batch = copy.deepcopy(model), next(some_batches())
    _, have, _ = trained(model, [batch], max_grad_norm=most)
    output = twin(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)
    echo_loss()(output, batch.tgt_y, batch.ntokens).backward()
    grad = twin.rows.weight.grad
    assert 0.1 < grad.norm() < 1e3
    want = twin.rows.weight - 0.25 * grad * min(1, most / grad.norm())
    torch.testing.assert_close(have["rows.weight"], want.detach(), atol=1e-7, rtol=1.3e-6)


def overflows(model):
    """Let the first gradient of the generator be infinite, as that of a scale that is too large."""
    first = [math.inf]
    model.generator.proj.weight.register_hook(lambda g: g * first.pop() if first else g)


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_autocast_and_the_scaler(accumulation_steps, device):
    """The loop of torch's examples, written out, of which the first update is left out."""
    model, seen = make_model(7, 7, 1, 16, 16, 2, 0.0).to(device), []
    twin = copy.deepcopy(model)
    model.encoder.layers[0].feed_forward.register_forward_hook(
        lambda module, inputs, output: seen.append(output.dtype)
    )
    x = torch.tensor([[1, 2, 3, 4], [1, 5, 6, 0]], device=device)
    batches, kind, half = [Batch(x, x)] * 4, device.type, torch.bfloat16

    def parts(m):
        overflows(m)
        scaler = torch.amp.GradScaler(kind, init_scale=2.0**10)
        compute = SimpleLossCompute(m.generator, LabelSmoothing(7, 0))
        return compute, *make_optimizer(m.parameters(), 16, 1.0, 4), scaler

    compute, optimizer, scheduler, scaler = parts(model)
    run_epoch(
        batches, model, compute, optimizer, scheduler, autocast=half, scaler=scaler,
        max_grad_norm=0.5, accumulation_steps=accumulation_steps, progress=False,
    )  # fmt: skip
    assert set(seen) == {half} and scheduler.last_epoch == 4 // accumulation_steps - 1
    assert scaler.get_scale() == 2.0**9

    compute, optimizer, scheduler, scaler = parts(twin)
    for i, b in enumerate(batches, 1):
        with torch.autocast(kind, half):
            out = twin(b.src, b.tgt, b.src_mask, b.tgt_mask)
            loss = compute(out, b.tgt_y, b.ntokens) / accumulation_steps
        scaler.scale(loss).backward()
        if i % accumulation_steps == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if i > accumulation_steps:
                scheduler.step()
    torch.testing.assert_close(dict(model.state_dict()), dict(twin.state_dict()))


def test_the_schedule_goes_on_where_the_scale_grows():
    """An update is left out where the scale has fallen, not where it is another one."""
    model, scaler = Echo(7), torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    assert trained(model, list(some_batches(3)), scaler=scaler)[2] == 3
    assert scaler.get_scale() == 32.0


def an_epoch(model, optimizer, **given):
    """The warnings of an epoch of three batches."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        given = dict(data=some_batches(3), loss_compute=echo_loss()) | given
        run_epoch(model=model, optimizer=optimizer, progress=False, **given)
    assert all(x.filename == __file__ for x in seen)
    return [str(x.message) for x in seen]


def test_run_epoch_warns_of_training_in_eval_mode():
    model = Echo(7).eval()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    [said] = an_epoch(model, optimizer)
    assert re.search(r"model is in eval\(\) mode.*model.train\(\)", said)
    assert an_epoch(model, None) == [] and not model.training  # the mode is left to the caller
    assert an_epoch(model.train(), optimizer) == [] and model.training


def test_an_optimizer_without_a_parameter_of_the_model_warns():
    """Not one of the model (a part of it, beside others, compiled, as an object that is no module),
    nor one of the loss alone.
    """
    model, other, head = Echo(7), nn.Linear(2, 2), Generator(7, 7)
    compiled = torch.compile(model, backend="eager")
    says = ["optimizer holds no parameter of model; make it from model.parameters()"]
    for trained in (model, compiled):
        assert an_epoch(trained, torch.optim.SGD(other.parameters(), 0.1)) == says  # once
    other.requires_grad_(False)
    groups = [{"params": other.parameters()}, {"params": model.parameters(), "lr": 0.3}]
    for trained in (model, compiled, model.forward):
        assert an_epoch(trained, torch.optim.SGD(groups, 0.1)) == []
    assert an_epoch(model, SimpleNamespace(step=int, zero_grad=int)) == []

    class Fixed(nn.Module):
        def forward(self, src, tgt, src_mask, tgt_mask):
            return nn.functional.one_hot(tgt, 7).float()

    own = torch.optim.SGD(head.parameters(), 0.1)
    for trained, generator in ((model, head), (Fixed(), lambda x: head(x))):
        compute = SimpleLossCompute(generator, LabelSmoothing(7, 0))
        assert an_epoch(trained, own, loss_compute=compute) == []


def test_padding_that_the_loss_does_not_ignore_warns():
    """Of the first batch, if it has any: 0 in the batches, which is a class of the loss."""
    model, x = Echo(7), torch.tensor([[1, 2, 3], [1, 2, 0]])
    says = "batch 1 is padded with 0, and padding_idx of the criterion is {}; give both the same"

    def epoch(padding_idx, *batches):
        loss = SimpleLossCompute(lambda x: x.log_softmax(-1), LabelSmoothing(7, padding_idx))
        return an_epoch(model, None, data=batches, loss_compute=loss)

    padded, full, relabeled = Batch(x, x), Batch(x[:1], x[:1]), Batch(x, x)
    for padding_idx in (6, None, -100):
        [said] = epoch(padding_idx, padded, padded)
        assert said.startswith(says.format(padding_idx))
    assert epoch(0, padded) == epoch(6, full, padded) == epoch(6, Batch(x, x, pad=6)) == []
    relabeled.tgt_y = relabeled.tgt_y.masked_fill(relabeled.tgt_y == 0, -100)
    duck = SimpleNamespace(**{n: v for n, v in vars(padded).items() if n != "pad"})
    assert epoch(-100, relabeled) == epoch(6, duck) == []
    assert an_epoch(model, None, data=[padded], loss_compute=lambda x, y, n: x.sum() / n) == []


def test_run_epoch_reports_the_speed_of_all_tokens_since_the_last_report(monkeypatch):
    """And their loss, of windows of two batches and of what is left; of a clock whose seconds are
    batches.
    """
    batches, model, seen, now = list(some_batches(5)), Echo(7), [], [0.0]

    def timed(batches):
        for batch in batches:
            now[0] += 1
            yield batch

    monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    report = lambda *values: seen.append(values)  # noqa: E731
    run_epoch(timed(batches), model, echo_loss(), report=report, report_every=2)
    windows = batches[:2], batches[2:4], batches[4:]
    tokens = [sum(int(batch.ntokens) for batch in window) for window in windows]
    assert len({int(batch.ntokens) for batch in batches}) > 1
    losses = [run_epoch(timed(x), model, echo_loss(), progress=False) for x in windows]
    assert [step for step, _, _ in seen] == [2, 4, 5]
    assert [loss for _, loss, _ in seen] == pytest.approx(losses, rel=1e-5)
    assert [speed for *_, speed in seen] == pytest.approx(
        [count / len(window) for count, window in zip(tokens, windows)]
    )


def test_run_epoch_prints_a_line_now_and_then_without_a_terminal(capsys):
    """Nothing without progress, and with it a bar with the loss and the speed."""

    def printed(**options):
        run_epoch(list(some_batches(4)), Echo(7), echo_loss(), report_every=2, **options)
        return capsys.readouterr()

    lines, errors = printed()
    lines = lines.splitlines()
    assert [line.split()[1] for line in lines] == ["2", "4"] and errors == ""
    assert all("loss" in line and line.endswith("tokens/s") for line in lines)
    assert printed(progress=False) == ("", "")
    drawn, _ = printed(progress=True, description="a")
    assert all(words in drawn for words in ("a: ", "/4", "loss ", "tokens/s"))


OWN = type("Own", (), {"step": print})()  # an optimizer that torch does not know


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"data": [(1, 2)]}, TypeError, "batch 1 of data is a tuple; expected a Batch"),
        ({"data": [Batch(ids)]}, ValueError, "batch 1 of data has no target"),
        ({"scheduler": object()}, ValueError, "scheduler is given without an optimizer"),
        ({"report_every": 0}, ValueError, "report_every is 0; expected 1 or more"),
        ({"accumulation_steps": 0}, ValueError, "accumulation_steps is 0; expected 1 or more"),
        ({"accumulation_steps": 2}, ValueError, "accumulation_steps is given without an optim"),
        ({"max_grad_norm": 0}, ValueError, "max_grad_norm is 0.0; expected a positive, finite"),
        ({"max_grad_norm": 1}, ValueError, "max_grad_norm is given without an optimizer"),
        ({"max_grad_norm": 1.0, "optimizer": OWN}, TypeError,
         "optimizer is a Own without param_groups"),
        ({"autocast": torch.float64}, ValueError, "autocast is torch.float64; expected torch.fl"),
        ({"scaler": torch.amp.GradScaler("cpu")}, ValueError,
         "scaler is given without an optimizer"),
        ({"cuda_graph": True}, ValueError, "cuda_graph is given without an optimizer"),
        ({"cuda_graph": True, "scaler": torch.amp.GradScaler("cpu")}, ValueError,
         "cuda_graph is True beside a scaler"),
    ],
)  # fmt: skip
def test_run_epoch_names_what_is_wrong(change, error, message):
    model = Echo(7)
    arguments = dict(data=some_batches(1), model=model, loss_compute=echo_loss())
    with pytest.raises(error, match=message):
        run_epoch(**arguments | change)
