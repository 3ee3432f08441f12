"""Models in a folder: their weights, and the arguments that build them again.

    model.json           the name of the factory, `make_model` or `make_decoder`, and its arguments
    model.safetensors    the parameters and buffers by their names, and a copy of model.json

The factory keeps its arguments in the model. A weight that several modules share is stored once.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastformer.checks import FLOATING, require_instance
from fastformer.dispatch import backends
from fastformer.mask_tiles import as_device
from fastformer.nn.transformer import EncoderDecoder, LanguageModel, make_decoder, make_model

DESCRIPTION, WEIGHTS = "model.json", "model.safetensors"
FORMAT = "fastformer model, version 1"
FACTORIES: dict[str, Callable[..., nn.Module]] = dict(
    make_model=make_model, make_decoder=make_decoder
)
OF_A_CALL = ("training", "keep_attention", "attn")  # attributes that are no part of a model


def save_model(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Save a model of `make_model` or `make_decoder` in a folder, from which `load_model` reads it.

    Each file is written under another name and then renamed: a save that is killed leaves the
    earlier model, or, between the two, files that `load_model` refuses. Other files stay.

    Args:
        model: an `EncoderDecoder` or a `LanguageModel` that the factory has made, on any device, of
            float32, float16, bfloat16 or float64. Its mode, hooks and requires_grad are not saved.
        folder: the path of a folder, which is made if it does not exist.

    Raises:
        ValueError: the model was made otherwise, or has other modules than its factory makes (save
            its `state_dict` then), is sharded, or has another dtype.
        TypeError: model is neither an EncoderDecoder nor a LanguageModel, folder is no path.
        OSError: the folder cannot be written.
    """
    from safetensors.torch import save_file

    path, text = _path(folder), _description(model)
    tensors = {name: x.detach().contiguous() for name, x in _tensors(model).items()}
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path) as new:
        save_file(tensors, os.path.join(new, WEIGHTS), metadata={"description": text})
        Path(new, DESCRIPTION).write_text(text)
        for name in (WEIGHTS, DESCRIPTION):
            os.replace(os.path.join(new, name), path / name)


def load_model(
    folder: str | os.PathLike[str], *, device: torch.device | str = "cpu"
) -> EncoderDecoder | LanguageModel:
    """Build the model that `save_model` has saved in a folder, with its weights and their dtypes.

    It is on the device, in training mode: call `.eval()` before decoding. torch's generator is
    left as it was. No code of the folder runs, and no model is built before the shapes of its
    weights agree with those of the file.

    Raises:
        ValueError: the folder is not one that `save_model` has written, is not complete, or its
            files do not belong together; device is no device. Nothing is loaded.
        TypeError: folder is no path.
    """
    path = _path(folder)
    device = as_device(device)
    try:
        return _loaded(path).to(device)
    except ValueError as error:
        raise ValueError(f"folder {str(path)!r}: {error}") from error


def _loaded(path: Path) -> EncoderDecoder | LanguageModel:
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file

    if not path.is_dir():
        kind = "is a file" if path.exists() else "does not exist"
        raise ValueError(f"it {kind}; expected a folder that save_model wrote")
    for name in (DESCRIPTION, WEIGHTS):
        if not (path / name).is_file():
            raise ValueError(f"it has no {name}; expected one that save_model wrote")
    text = (path / DESCRIPTION).read_text(errors="replace")
    try:
        with safe_open(path / WEIGHTS, framework="pt") as file:
            copy = (file.metadata() or {}).get("description")
        tensors = load_file(path / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{WEIGHTS} is damaged: {error}") from error
    with torch.device("meta"):  # which allocates nothing
        twin = _built(text, len(tensors))
    if copy != text:
        expected = "expected the files of one save_model"
        raise ValueError(f"{WEIGHTS} does not belong to {DESCRIPTION}; {expected}")
    if wrong := _wrong(tensors, twin, f" in {WEIGHTS}"):
        raise ValueError(wrong)
    model = _built(text, len(tensors))
    for name, x in _tensors(model).items():
        # .data leaves shared weights shared; a clone is aligned, and outputs agree to the last bit.
        x.data = tensors[name].clone()
    return model


def _path(folder: str | os.PathLike[str]) -> Path:
    require_instance("folder", folder, (str, os.PathLike), "a path")
    if not os.fspath(folder):
        raise ValueError("folder is ''; expected a path")
    return Path(folder)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return what the state dict holds by name; what modules share, by the first of its names."""
    kept = model.state_dict().keys()
    buffers = {name: x for name, x in model.named_buffers() if name in kept}
    return {**dict(model.named_parameters()), **buffers}


def _wrong(tensors: dict[str, Tensor], twin: nn.Module, where: str = "") -> str | None:
    """Return which tensor has another shape than in the twin, or a dtype that no model has."""
    shapes = [{n: list(x.shape) for n, x in of.items()} for of in (tensors, _tensors(twin))]
    for name in sorted({**shapes[0], **shapes[1]}):
        have, want = (of.get(name, "none") for of in shapes)
        if have != want:
            return f"{name} has shape {have}{where}; expected {want}, by the arguments"
    for name, x in tensors.items():
        if x.dtype not in FLOATING:
            return f"{name} has dtype {x.dtype}; expected float32, float16, bfloat16 or float64"
    return None


def _built(text: str, weights: int) -> EncoderDecoder | LanguageModel:
    """Return a new model by a description, without a trace in torch's generator."""
    try:
        described = json.loads(text)
        if described["format"] != FORMAT:
            raise ValueError(f"format is {described['format']!r}; expected {FORMAT!r}")
        arguments = described["arguments"]
        if isinstance(N := arguments.get("N"), int) and weights < N:
            raise ValueError(f"N is {N}; expected layers of the {weights} tensors in {WEIGHTS}")
        with torch.random.fork_rng(devices=[]):
            model: Any = FACTORIES[described["factory"]](**arguments)
        if described.get("float64_rotary"):
            model.decoder.rotary.double()
        return model
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        message = f"{DESCRIPTION} is damaged, or save_model did not write it: {error!r}"
        raise ValueError(message) from error


def _description(model: Any) -> str:
    """Return the text of model.json, after a check that it gives this model again."""
    kinds = EncoderDecoder, LanguageModel
    require_instance("model", model, kinds, "an EncoderDecoder or a LanguageModel")
    tensors = _tensors(model)
    if any(backends.is_dtensor(x) for x in tensors.values()):
        raise ValueError("model is sharded over devices; expected a model on one of them")
    if not hasattr(model, "_made"):
        raise ValueError(
            "model was not made by make_model or make_decoder, whose arguments save_model writes; "
            "expected one of theirs: use torch.save(model.state_dict(), ..) for another model"
        )
    factory, arguments = model._made
    with torch.device("meta"):
        twin = FACTORIES[factory](**arguments)
    if wrong := _difference(model, twin) or _wrong(tensors, twin):
        raise ValueError(f"model differs from what {factory} makes: {wrong}")
    described: dict[str, Any] = dict(format=FORMAT, factory=factory, arguments=arguments)
    rotary: Any = getattr(model.decoder, "rotary", None)
    if rotary is not None and rotary.table.dtype == torch.float64:
        described["float64_rotary"] = True  # the table is no part of the weights
    return json.dumps(described, indent=1, default=lambda number: number.item()) + "\n"


def _difference(model: nn.Module, twin: nn.Module) -> str | None:
    """Return which module, or number of a module, is not that of the twin, or None."""
    ours, theirs = (dict(m.named_modules(remove_duplicate=False)) for m in (model, twin))
    for name in {**ours, **theirs}:
        have, want = ours.get(name), theirs.get(name)
        if type(have) is not type(want):
            kinds = [type(module).__name__ for module in (have, want)]
            return f"{name or 'model'} is a {kinds[0]}; expected a {kinds[1]}"
        for key, value in vars(want).items():
            plain = isinstance(value, (bool, int, float, str)) or value is None
            if plain and key not in OF_A_CALL and vars(have).get(key) != value:
                return f"{name}.{key} is {vars(have).get(key)!r}; expected {value!r}"
    return None
