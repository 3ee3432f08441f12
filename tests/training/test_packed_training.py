"""Training without padding: a packed `Batch` gives the losses and gradients of the padded one."""

import copy
import re

import pytest
import torch

import fastformer as ff
from benchmarks import ROOT

V, PAD = 13, 0
OPTIONS = {
    "pre-norm": {},
    "post-norm, learned positions": dict(norm_first=False, learned_positions=True),
    "grouped, swiglu, rms": dict(kv_heads=1, activation="swiglu", norm="rms"),
}


def rows(device, b=4, s=9, lengths=(9, 2, 0, 6)):
    """Token ids [b, s] with padding at the end of each row."""
    x = torch.randint(1, V, (b, s), device=device)
    x[torch.arange(s, device=device) >= torch.tensor(lengths, device=device)[:, None]] = PAD
    return x


def batches(device, translates, **given):
    """The same batch padded and packed."""
    src, tgt = rows(device), rows(device, s=8, lengths=(5, 8, 1, 3))
    if translates:  # a packed source may have its padding anywhere
        src[0, :3] = src[3, 2] = PAD
    return [ff.Batch(src if translates else None, tgt, packed=packed) for packed in (False, True)]


def made(device, translates, **options):
    sizes = dict(N=2, d_model=16, d_ff=24, h=2, dropout=0.0, max_len=12) | options
    make = (ff.make_model, V, V) if translates else (ff.make_decoder, V)
    model = make[0](*make[1:], **sizes).to(device)
    return model, ff.SimpleLossCompute(model.generator, ff.LabelSmoothing(V, PAD, 0.1))


def loss_of(model, compute, batch):
    inputs = (batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)
    inputs = inputs if batch.src is not None else inputs[1::2]
    return compute(model(*inputs), batch.tgt_y, batch.ntokens)


@pytest.mark.parametrize("case", list(OPTIONS))
@pytest.mark.parametrize("translates", [True, False])
def test_the_loss_is_that_of_the_padded_batch(translates, case, backend, device):
    """And so are the gradients, all against float64."""
    model, compute = made(device, translates, **OPTIONS[case])
    padded, packed = batches(device, translates)
    oracle = copy.deepcopy(model).double()
    exact = ff.SimpleLossCompute(oracle.generator, compute.criterion)
    with ff.use_backend("reference"):
        want = loss_of(oracle, exact, padded)
        wanted = torch.autograd.grad(want, list(oracle.parameters()))
    have = loss_of(model, compute, packed)
    assert abs(have.item() - want.item()) <= 1e-5 * want.item()
    grads = torch.autograd.grad(have, list(model.parameters()))
    for (name, _), x, y in zip(model.named_parameters(), grads, wanted):
        assert (x - y).norm() <= 1e-5 * max(1.0, float(y.norm())), name


@pytest.mark.parametrize("translates", [True, False])
def test_run_epoch_without_padding(translates, backend, device):
    """The losses of each update, with accumulation and a schedule, are those of padded batches."""
    losses = []
    made_once = made(device, translates, N=1)
    data = [batches(device, translates) for _ in range(1 if backend == "triton" else 4)]
    for packed in (0, 1):
        model, compute = copy.deepcopy(made_once)
        compute.generator = model.generator
        optimizer, scheduler = ff.make_optimizer(model.parameters(), 16, warmup=4)
        losses.append([])
        for _ in range(2):
            loss = ff.run_epoch(
                [pair[packed] for pair in data], model, compute, optimizer, scheduler,
                progress=False, accumulation_steps=2,
                report=lambda step, loss, speed: losses[-1].append(loss), report_every=1,
            )  # fmt: skip
            losses[-1].append(loss)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
    assert losses[0][-1] < losses[0][0]


def test_padding_changes_the_batches_of_the_documented_program():
    """docs/training.md says how many updates it makes, packed and padded."""
    page = (ROOT / "docs" / "training.md").read_text()
    program = re.search(r"```python\n(import pathlib.*?)\nff.save_model", page, re.DOTALL)[1]
    program, updates = program.replace("ff.fit(", "result = ff.fit("), []
    for code in (program, program.replace(", packed=True", "")):
        names = {}
        exec(code, names)
        updates.append(len(names["result"].losses))
    assert f"this program makes {updates[1]} updates\ninstead of {updates[0]}." in page
    assert updates[0] != updates[1]


def test_batch_packed(device):
    src = torch.tensor([[PAD, 4, 5], [6, PAD, PAD]], device=device)
    tgt = torch.tensor([[1, 7, 8, 2], [1, 9, PAD, PAD]], device=device)
    batch = ff.Batch(src, tgt, packed=True)
    assert batch.src.tolist() == [4, 5, 6] and batch.src_mask.positions.tolist() == [1, 2, 0]
    assert batch.src_mask.cu_seqlens.tolist() == [0, 2, 3]
    assert batch.tgt.tolist() == [1, 7, 8, 1] and batch.tgt_y.tolist() == [7, 8, 2, 9]
    assert batch.tgt_mask.positions.tolist() == [0, 1, 2, 0] and batch.tgt_mask.longest == 3
    assert int(batch.ntokens) == 4
    assert "src=[3], tgt=[4]" in repr(batch)
    alone = ff.Batch(src, packed=True)
    assert alone.tgt is None and alone.src.tolist() == [4, 5, 6]
    moved = batch.to("meta")
    assert moved.tgt_mask.cu_seqlens.is_meta and moved.src_mask.indices.is_meta
    assert not batch.src_mask.indices.is_meta and moved.tgt_mask.longest == 3
    other = ff.Batch(None, tgt, pad=2, packed=True)
    assert other.tgt.tolist() == [1, 7, 1, 9, PAD] and int(other.ntokens) == 5


def test_a_batch_of_padding_alone_is_packed(backend, device):
    model, compute = made(device, True)
    src, tgt = (torch.zeros(2, n, dtype=torch.int64, device=device) for n in (3, 4))
    batch = ff.Batch(src, tgt, packed=True)
    assert batch.src.shape == (0,) and loss_of(model, compute, batch).item() == 0


def test_embeddings_module_by_module(device):
    """With a hook the embedding is called part by part, at the same positions."""
    _, packed = batches(device, False)
    model, compute = made(device, False)
    want = loss_of(model, compute, packed)
    seen = []
    model.embed[0].register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(loss_of(model, compute, packed), want)
    assert seen


def test_weights_of_a_decoder_without_padding(device):
    """The attention to a memory of other lengths keeps its weights, too."""
    padded, packed = batches(device, True)
    model, _ = made(device, True, N=1)
    attention = model.decoder.layers[0].src_attn
    attention.keep_attention = True
    kept = []
    for batch in (padded, packed):
        model(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)
        kept.append(attention.attn)
    n = packed.tgt_mask.lengths.tolist()
    for b, keys in enumerate(packed.src_mask.lengths.tolist()):
        have, want = kept[1][b, :, : n[b]], kept[0][b, :, : n[b]]
        seen = padded.src_mask[b, 0]
        torch.testing.assert_close(have[..., :keys], want[..., seen])
        assert (have[..., keys:] == 0).all()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"packed": 1}, TypeError, "packed is"),
        ({"tgt": torch.tensor([[1, 2, 3], [0, 4, 5]])}, ValueError,
         "tgt has padding before a token in row 1; expected padding at the end"),
        ({"tgt": torch.ones(2, 3, dtype=torch.int64, device="meta"), "src": None}, ValueError,
         "tgt is on meta"),
        ({"src": torch.ones(2, 3, dtype=torch.int64, device="meta"), "tgt": None}, ValueError,
         "src is on meta"),
        ({"src": torch.ones(3, dtype=torch.int64)}, ValueError, "src has shape"),
    ],
)  # fmt: skip
def test_a_packed_batch_names_what_is_wrong(arguments, error, message):
    given = dict(src=rows("cpu", b=2, lengths=(9, 2)), tgt=torch.ones(2, 4, dtype=torch.int64))
    with pytest.raises(error, match=message):
        ff.Batch(**{**given, "packed": True, **arguments})


def test_models_name_what_is_wrong():
    padded, packed = batches("cpu", True)
    model, decoder = (made("cpu", translates)[0] for translates in (True, False))
    short, _ = made("cpu", False, max_len=4)
    src, tgt, of_src, of_tgt = packed.src, packed.tgt, packed.src_mask, packed.tgt_mask
    fewer = ff.Batch(rows("cpu", b=2, lengths=(9, 2)), packed=True)
    cache, memory, x = ff.DecoderCache(12), model.encode(src, of_src), torch.zeros(len(tgt), 16)
    cut = type(of_tgt)(**{**vars(of_tgt), "indices": of_tgt.indices[1:]})
    attend = model.decoder.layers[0].src_attn
    kept, other = copy.deepcopy(attend), copy.deepcopy(decoder)
    kept.keep_attention, other.embed = True, torch.nn.Embedding(V, 16)
    for call, error, message in (
        (lambda: model(src, tgt, of_src, None), TypeError, "tgt_mask is a NoneType; expected a P"),
        (lambda: model(src, tgt, padded.src_mask, of_tgt), TypeError, "src_mask is a Tensor; ex"),
        (lambda: model.decoder(memory, memory, of_src, None), TypeError, "tgt_mask is a NoneType"),
        (lambda: model(src[1:], tgt, of_src, of_tgt), ValueError, "src has shape .*expected the"),
        (lambda: model(src, tgt[1:], of_src, of_tgt), ValueError, "tgt has shape .*expected the"),
        (lambda: model(src[:, None], tgt, of_src, of_tgt), ValueError, r"expected \[tokens\]"),
        (lambda: model(fewer.src, tgt, fewer.src_mask, of_tgt), ValueError,
         "query_packing has 4 sequences; expected those of mask, 2"),
        (lambda: model.decode(memory, of_src, tgt, of_tgt, cache), ValueError, "cache is given"),
        (lambda: decoder(tgt, of_tgt, cache), ValueError, "cache is given together with a Packing"),
        (lambda: decoder(tgt[:-1], of_tgt), ValueError, "tokens has shape"),
        (lambda: short(tgt, of_tgt), ValueError, "tokens; expected at most max_len = 4"),
        (lambda: other(tgt, of_tgt), TypeError, "or of a packed batch"),
        (lambda: attend(x, memory, memory, None, query_packing=of_tgt), ValueError,
         "query_packing is given, and mask is a NoneType"),
        (lambda: attend(x, memory, memory, of_src, query_packing="no"), TypeError,
         "query_packing is a str; expected a Packing or None"),
        (lambda: attend(x, memory, memory, of_src, query_packing=cut), ValueError,
         "query has shape .*expected the"),
        (lambda: kept(x, memory, memory, of_src, query_packing=of_tgt,
                      causal_alignment="bottom_right"), ValueError,
         "causal_alignment is 'bottom_right' beside"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()
