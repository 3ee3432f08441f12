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
from fastformer.nn.transformer import EncoderDecoder, LanguageModel, make_decoder, make_model

DESCRIPTION, WEIGHTS = "model.json", "model.safetensors"
FORMAT = "fastformer model, version 1"
FACTORIES: dict[str, Callable[..., nn.Module]] = dict(
    make_model=make_model, make_decoder=make_decoder
)
OF_A_CALL = ("training", "keep_attention", "attn")  # attributes that are no part of a model


def save_model(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Save a model of `make_model` or `make_decoder` in a folder, from which `load_model` reads it.

    The folder holds `model.safetensors`, the parameters and buffers, and `model.json`, the
    arguments of the factory. Each file is written under another name and then renamed, so that a
    save that is killed leaves the earlier model, or, between the two, files that `load_model`
    refuses. Other files in the folder stay.

    Args:
        model: an `EncoderDecoder` or a `LanguageModel` that the factory has made, on any device, of
            float32, float16, bfloat16 or float64. Its mode, hooks and requires_grad are not saved.
        folder: the path of a folder, which is made if it does not exist.

    Raises:
        ValueError: the model was made otherwise, or has other modules than its factory makes (save
            its `state_dict` and the code that builds it), is sharded, or has another dtype.
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

    The model is in training mode, as a new one is: call `.eval()` before decoding. torch's
    generator is left as it was. No code of the folder runs, and no model is built before the
    shapes of its weights agree with those of the file.

    Args:
        folder: the folder that `save_model` has written.
        device: the device of the model.

    Raises:
        ValueError: the folder does not exist, is not one that `save_model` has written, is not
            complete, has weights of another dtype than float32, float16, bfloat16 or float64, or
            its files do not belong together; device is no device. Nothing is loaded.
        TypeError: folder is no path.
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file

    path = _path(folder)
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device is {device!r}; expected a device: {error}") from error
    if not path.is_dir():
        kind = "is a file" if path.exists() else "does not exist"
        raise ValueError(f"{_named(path)} {kind}; expected a folder that save_model wrote")
    for name in (DESCRIPTION, WEIGHTS):
        if not (path / name).is_file():
            raise ValueError(f"{_named(path)} has no {name}; expected one that save_model wrote")
    text = (path / DESCRIPTION).read_text(errors="replace")
    try:
        with safe_open(path / WEIGHTS, framework="pt") as file:
            copy = (file.metadata() or {}).get("description")
        tensors = load_file(path / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{_named(path)}: {WEIGHTS} is damaged: {error}") from error
    with torch.device("meta"):  # which allocates nothing
        twin = _built(path, text, len(tensors))
    if copy != text:
        raise ValueError(
            f"{_named(path)}: {WEIGHTS} does not belong to {DESCRIPTION}; expected the files of "
            "one save_model"
        )
    given, wanted = ({n: x.shape for n, x in of.items()} for of in (tensors, _tensors(twin)))
    if given != wanted:
        name = sorted(n for n in {**given, **wanted} if given.get(n) != wanted.get(n))[0]
        raise ValueError(
            f"{_named(path)}: {name} has shape {_shape(given.get(name))} in {WEIGHTS}; "
            f"expected {_shape(wanted.get(name))}, by the arguments in {DESCRIPTION}"
        )
    if wrong := _of_another_dtype(tensors):
        raise ValueError(f"{_named(path)}: {wrong}")
    model = _built(path, text, len(tensors))
    for name, x in _tensors(model).items():
        # .data leaves shared weights shared; a clone is aligned, and outputs agree to the last bit.
        x.data = tensors[name].clone()
    return model.to(device)


def _path(folder: str | os.PathLike[str]) -> Path:
    require_instance("folder", folder, (str, os.PathLike), "a path")
    if not os.fspath(folder):
        raise ValueError("folder is ''; expected a path")
    return Path(folder)


def _named(path: Path) -> str:
    return f"folder {str(path)!r}"


def _shape(shape: torch.Size | None) -> str:
    return "none" if shape is None else str(list(shape))


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of the state dict by name; what modules share, by the first
    of its names.
    """
    kept = model.state_dict().keys()
    buffers = {name: x for name, x in model.named_buffers() if name in kept}
    return {**dict(model.named_parameters()), **buffers}


def _of_another_dtype(tensors: dict[str, Tensor]) -> str | None:
    """Return which tensor has a dtype that no model has, or None."""
    for name, x in tensors.items():
        if x.dtype not in FLOATING:
            return f"{name} has dtype {x.dtype}; expected float32, float16, bfloat16 or float64"
    return None


def _built(path: Path, text: str, weights: int) -> EncoderDecoder | LanguageModel:
    """Return a new model by the description of a file with so many weights, without a trace in
    torch's generator.
    """
    try:
        described = json.loads(text)
        if described["format"] != FORMAT:
            raise ValueError(f"format is {described['format']!r}; expected {FORMAT!r}")
        factory, arguments = FACTORIES[described["factory"]], described["arguments"]
        layers = arguments.get("N")
        if isinstance(layers, int) and layers > weights:
            raise ValueError(
                f"N is {layers}; expected layers of the {weights} tensors in {WEIGHTS}"
            )
        with torch.random.fork_rng(devices=[]):
            model: Any = factory(**arguments)
        if described.get("float64_rotary"):
            model.decoder.rotary.double()
        return model
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"{_named(path)}: {DESCRIPTION} is damaged, or save_model did not write it: {error!r}"
        ) from error


def _description(model: Any) -> str:
    """Return the text of model.json, after a check that it gives this model again."""
    kinds = EncoderDecoder, LanguageModel
    require_instance("model", model, kinds, "an EncoderDecoder or a LanguageModel")
    if any(backends.is_dtensor(x) for x in _tensors(model).values()):
        raise ValueError("model is sharded over devices; expected a model on one of them")
    if not hasattr(model, "_made"):
        raise ValueError(
            "model was not made by make_model or make_decoder, whose arguments save_model writes; "
            "expected one of theirs: use torch.save(model.state_dict(), ..) for another model"
        )
    factory, arguments = model._made
    with torch.device("meta"):
        twin = FACTORIES[factory](**arguments)
    difference = _difference(model, twin)
    if difference is not None:
        raise ValueError(f"model differs from what {factory} makes: {difference}")
    if wrong := _of_another_dtype(_tensors(model)):
        raise ValueError(f"model: {wrong}")
    described: dict[str, Any] = dict(format=FORMAT, factory=factory, arguments=arguments)
    rotary: Any = getattr(model.decoder, "rotary", None)
    if rotary is not None and rotary.table.dtype == torch.float64:
        described["float64_rotary"] = True  # the table is no part of the weights
    return json.dumps(described, indent=1, default=lambda number: number.item()) + "\n"


def _difference(model: nn.Module, twin: nn.Module) -> str | None:
    """Return what the factory makes otherwise, or None."""
    ours, theirs = (dict(m.named_modules(remove_duplicate=False)) for m in (model, twin))
    for name in {**ours, **theirs}:
        if name not in ours or name not in theirs:
            where = "the model" if name in ours else "what the factory makes"
            return f"{where} alone has a module {name}"
        if type(ours[name]) is not type(theirs[name]):
            return f"{name or 'model'} is a {type(ours[name]).__name__}"
        for key, value in vars(theirs[name]).items():
            plain = isinstance(value, (bool, int, float, str)) or value is None
            given = vars(ours[name]).get(key)
            if plain and key not in OF_A_CALL and given != value:
                return f"{name}.{key} is {given!r}; expected {value!r}"
    shapes = [{name: x.shape for name, x in _tensors(m).items()} for m in (model, twin)]
    for name in {**shapes[0], **shapes[1]}:
        if shapes[0].get(name) != shapes[1].get(name):
            have, want = (_shape(of.get(name)) for of in shapes)
            return f"{name} has shape {have}; expected {want}"
    return None
