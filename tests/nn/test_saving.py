"""Models that are saved in a folder and loaded again, and folders that are refused."""

import copy
import json
import os
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

import fastformer as ff
from fastformer.nn import saving

SMALL = dict(N=2, d_model=8, d_ff=12, h=2)
OPTIONS = dict(
    norm_first=False, activation="swiglu", norm="rms", kv_heads=1, learned_positions=True,
    max_len=9, padding_idx=0, tie_generator=True, dropout=0.25,
)  # fmt: skip
MODELS = {
    "make_model": lambda: ff.make_model(7, 9, **SMALL),
    "make_model, tied": lambda: ff.make_model(7, 7, **SMALL, **OPTIONS, tie_source=True),
    "make_model without layers": lambda: ff.make_model(7, 9, 0, 8, norm="rms"),
    "make_decoder": lambda: ff.make_decoder(7, **SMALL, **OPTIONS),
    "make_decoder, rotary": lambda: ff.make_decoder(
        7, **SMALL, positions="rotary", rope_theta=50.0, qk_norm=True, max_len=9
    ),
    "make_decoder without layers": lambda: ff.make_decoder(7, 0, 8, h=2, positions="rotary"),
    "numbers of NumPy": lambda: ff.make_decoder(numpy.int64(7), **SMALL, dropout=numpy.float32(0)),
    "of several dtypes": lambda: single(ff.make_decoder(7, **SMALL).bfloat16(), "norm"),
    "rotary in float64": lambda: ff.make_decoder(7, **SMALL, positions="rotary").double(),
    "rotary, a table of float32": lambda: single(MODELS["rotary in float64"](), "rotary"),
}


def single(model, part):
    """The model, with a part of its decoder in float32."""
    getattr(model.decoder, part).float()
    return model


def outputs(model):
    tokens = torch.arange(1, 7).view(2, 3)
    if isinstance(model, ff.LanguageModel):
        return model.eval()(tokens)
    return model.eval()(tokens, tokens, None, ff.subsequent_mask(3))


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_model_comes_back_with_its_weights(make, tmp_path):
    model, folder = make(), tmp_path / "new" / "model"
    before = torch.get_rng_state()
    ff.save_model(model, folder)
    loaded = ff.load_model(str(folder))
    assert next(ff.load_model(folder, device="meta").parameters()).is_meta
    assert torch.equal(torch.get_rng_state(), before)
    assert type(loaded) is type(model) and repr(loaded) == repr(model) and loaded.training
    assert sorted(p.name for p in folder.iterdir()) == ["model.json", "model.safetensors"]
    assert sorted(p.name for p in folder.parent.iterdir()) == ["model"]
    have, want = loaded.state_dict(), model.state_dict()
    assert list(have) == list(want)
    for name, x in want.items():
        assert have[name].dtype == x.dtype and torch.equal(have[name], x), name
    for have, want in zip(loaded.buffers(), model.buffers(), strict=True):  # the rotary table, too
        assert have.dtype == want.dtype and torch.equal(have, want)
    assert torch.equal(outputs(loaded), outputs(model))
    names = [n for n, _ in model.named_parameters()]
    assert [n for n, _ in loaded.named_parameters()] == names  # shared weights are shared again


def test_a_model_built_on_meta_takes_weights():
    """With its tables of positions, which are no part of the state dict if they are rotary."""
    for kind in ("make_model", "make_decoder", "make_decoder, rotary", "rotary in float64"):
        model = MODELS[kind]()
        for assign in (True, False):
            with torch.device("meta"):
                empty = MODELS[kind]()
            if not assign:
                empty = empty.to_empty(device="cpu").to(next(model.parameters()).dtype)
            empty.load_state_dict(model.state_dict(), assign=assign)
            assert torch.equal(outputs(empty), outputs(model)), (kind, assign)
            for have, want in zip(empty.buffers(), model.buffers(), strict=True):
                assert have.dtype == want.dtype and torch.equal(have, want)


def test_saving_again_replaces_the_model_and_a_failure_keeps_it(tmp_path, monkeypatch):
    first, second, folder = MODELS["make_model"](), MODELS["make_decoder"](), tmp_path / "model"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    ff.save_model(first, folder)
    monkeypatch.setattr("safetensors.torch.save_file", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ff.save_model(second, folder)
    monkeypatch.undo()
    assert isinstance(ff.load_model(folder), ff.EncoderDecoder)

    def killed(source, target, replace=os.replace):
        if Path(target).name == "model.json":
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        ff.save_model(second, folder)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"model.safetensors does not belong to model.json"):
        ff.load_model(folder)
    ff.save_model(second, folder)
    assert isinstance(ff.load_model(folder), ff.LanguageModel)
    assert sorted(os.listdir(folder)) == ["model.json", "model.safetensors", "notes.txt"]


# By name: what makes the model another than its factory's, and the words of the error.
CHANGES = {
    "another class": (
        lambda m: setattr(m.decoder.layers[1], "feed_forward", nn.Sequential()),
        "decoder.layers.1.feed_forward is a Sequential",
    ),
    "deeper": (
        lambda m: m.encoder.layers.append(copy.deepcopy(m.encoder.layers[0])),
        "encoder.layers.2 is a EncoderLayer; expected a NoneType",
    ),
    "epsilon": (
        lambda m: setattr(m.decoder.norm, "eps", 1e-3), "decoder.norm.eps is 0.001; expected 1e-06"
    ),
    "without bias": (
        lambda m: setattr(m.generator.proj, "bias", None),
        "model differs from what make_model makes: generator.proj.bias",
    ),
    "dropout": (
        lambda m: setattr(m.src_embed[1].dropout, "p", 0.5),
        "src_embed.1.dropout.p is 0.5; expected 0.1",
    ),
    "complex numbers": (
        lambda m: setattr(m.decoder.norm.weight, "data", m.decoder.norm.weight.data.cfloat()),
        "model .* has dtype torch.complex64; expected float32, float16,",
    ),
    "shared": (
        lambda m: setattr(m.decoder.layers[0].self_attn.linears[0], "weight",
                          m.decoder.layers[1].self_attn.linears[0].weight),
        "decoder.layers.1.self_attn.linears.0.weight",
    ),
    "accelerated": (ff.accelerate, None),  # nothing of the package's own is replaced
}  # fmt: skip


@pytest.mark.parametrize(("change", "words"), CHANGES.values(), ids=CHANGES)
def test_a_model_that_its_factory_does_not_make_is_refused(change, words, tmp_path):
    model = MODELS["make_model"]()
    change(model)
    if words is None:
        return ff.save_model(model, tmp_path / "model")
    with pytest.raises(ValueError, match=words):
        ff.save_model(model, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


BY_HAND = ff.LanguageModel(**dict(ff.make_decoder(7, **SMALL).named_children()))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((nn.Linear(2, 2), "x"), TypeError, "model is a Linear; expected an EncoderDecoder or"),
        ((None, "x"), TypeError, "model is a NoneType"),
        ((BY_HAND, "x"), ValueError, r"model was not made by make_model or .*state_dict\(\)"),
        ((MODELS["make_decoder"](), 3), TypeError, "folder is a int; expected a path"),
        ((MODELS["make_decoder"](), ""), ValueError, "folder is ''; expected a path"),
    ],
)
def test_bad_arguments_of_save(arguments, error, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=words):
        ff.save_model(*arguments)
    assert list(tmp_path.iterdir()) == []


def edit(folder, **changes):
    path = folder / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def rewritten(folder, change=lambda x: x, **arguments):
    """Both files of one description, whose arguments are changed: only the weights disagree, each
    of which becomes change(weight).
    """
    from safetensors.torch import load_file, save_file

    described = json.loads((folder / "model.json").read_text())
    described["arguments"] |= arguments
    text = json.dumps(described)
    (folder / "model.json").write_text(text)
    weights = {n: change(x) for n, x in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"description": text})


@pytest.mark.parametrize(
    ("spoil", "words"),
    {
        "no folder": (lambda f: f.rename(f.with_name("other")), "does not exist"),
        "a file": (lambda f: (f.rename(f.with_name("other")), f.touch()), "is a file"),
        "no description": (lambda f: (f / "model.json").unlink(), "has no model.json"),
        "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
        "half the weights": (
            lambda f: os.truncate(f / "model.safetensors", 2000), "model.safetensors is damaged"),
        "no JSON": (lambda f: (f / "model.json").write_text("{"), "model.json is damaged, or sav"),
        "a list": (lambda f: (f / "model.json").write_text("[]"), "model.json is damaged, or sav"),
        "of another program": (
            lambda f: (f / "model.json").write_text('{"model_type": "bert"}'), "'format'"),
        "a later version": (
            lambda f: edit(f, format="fastformer model, version 2"), "expected 'fastformer model,"),
        "another factory": (lambda f: edit(f, factory="print"), "model.json is damaged.*'print'"),
        "another argument": (lambda f: edit(f, arguments={"layers": 3}), "'layers'"),
        "a bad number": (lambda f: edit(f, arguments={"vocab": -1}), "vocab is -1"),
        "files of two models": (
            lambda f: edit(f, arguments={"vocab": 7}), "does not belong to model.json"),
        "weights of another width": (
            lambda f: rewritten(f, d_ff=13), r"decoder.layers.0.feed_forward.w_1.bias has shape "
            r"\[12\] in model.safetensors; expected \[13\]"),
        "weights of more layers": (
            lambda f: rewritten(f, N=1), r"has shape \[12\] in model.safetensors; expected none"),
        "integers": (lambda f: rewritten(f, torch.Tensor.long), "has dtype torch.int64; expected "),
        "float8": (
            lambda f: rewritten(f, lambda x: x.to(torch.float8_e4m3fn)), "dtype torch.float8_e4m3"),
        "deep JSON": (
            lambda f: (f / "model.json").write_text("[" * 200_000), "damaged.*RecursionError"),
        "wide": (
            lambda f: rewritten(f, d_model=10**9, h=1, kv_heads=1),
            r"expected \[.*1000000000.*\], by the arg"),
        "wide and rotary": (
            lambda f: rewritten(
                f, d_model=10**9, h=1, kv_heads=1, positions="rotary", learned_positions=False
            ),
            r"expected \[.*1000000000.*\], by the arg"),
        "past float64": (
            lambda f: rewritten(f, dropout=10**400), "dropout is too large an int; expected a "),
        "past int64": (lambda f: rewritten(f, d_model=2 * 10**9, d_ff=2 * 10**9), "is damaged"),
        "deep": (lambda f: rewritten(f, N=10**9), "N is 1000000000; expected layers of the 38 ten"),
    }.values(),
)  # fmt: skip
def test_a_folder_that_is_not_whole_is_refused_by_name(spoil, words, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    ff.save_model(ff.make_decoder(7, **SMALL), folder)
    spoil(folder)

    def make(**arguments):
        assert torch.get_default_device().type == "meta"  # where no size is too large
        return ff.make_decoder(**arguments)

    monkeypatch.setitem(saving.FACTORIES, "make_decoder", make)
    with pytest.raises(ValueError, match=rf"folder '{folder}'.*{words}"):
        ff.load_model(folder)
