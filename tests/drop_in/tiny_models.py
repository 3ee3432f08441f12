"""Tiny, randomly initialised models of transformers."""

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
