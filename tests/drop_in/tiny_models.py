"""Tiny, randomly initialised models of transformers, and methods with another source."""

import inspect
import textwrap

import transformers


class Tiny:
    """Makes a model: `Tiny("Llama", **sizes)(**changes)` is a LlamaForCausalLM of a LlamaConfig."""

    def __init__(self, name, head="ForCausalLM", **sizes):
        self.name, self.head, self.sizes = name, head, sizes
        self.__name__ = name.lower()  # of the cases of a test

    def __call__(self, **changes):
        config = getattr(transformers, f"{self.name}Config")(**{**self.sizes, **changes})
        cls = getattr(transformers, f"{self.name.removesuffix('Text')}{self.head}")
        return cls._from_config(config)


def edited(method, old, new, folder):
    """A function of another source, in the module of the method."""
    method = inspect.unwrap(method)
    source = textwrap.dedent(inspect.getsource(method))
    assert source.count(old) == 1
    file = folder / "edited.py"
    file.write_text(source.replace(old, new))
    names = dict(method.__globals__)
    exec(compile(file.read_text(), str(file), "exec", dont_inherit=True), names)
    return names[method.__name__]
