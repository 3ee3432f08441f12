"""Maps the top-level folder kernels/ to the package fastformer.kernels; everything else is in
pyproject.toml.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.editable_wheel import editable_wheel


class TypedEditable(editable_wheel):  # type: ignore[misc]
    """An editable install that mypy finds as well.

    setuptools finds the package by an import hook, which mypy does not run. It reads the folders
    that *.pth files name: this adds build/types, with a stub package of links to the sources, which
    no import can reach. Without links, or with another setuptools, the install has no types.
    """

    def _select_strategy(self, name: str, tag: str, build_lib: Any) -> Any:
        strategy = super()._select_strategy(name, tag, build_lib)
        implementation = getattr(strategy, "get_implementation", None)
        if implementation is None:
            return strategy
        types = Path(self.project_dir).resolve() / "build" / "types"

        def files() -> Iterator[tuple[str, bytes]]:
            yield from implementation()
            if _link(types / "fastformer-stubs", types.parents[1]):
                yield f"__editable__.{name}.types.pth", f"{types}\n".encode()

        strategy.get_implementation = files
        return strategy


def _link(stubs: Path, root: Path) -> bool:
    """Fill a folder with links to the modules of the package; return whether links can be made."""
    sources = {path.name: path for path in (root / "fastformer").iterdir()} | {
        "__init__.pyi": root / "fastformer" / "__init__.py",
        "kernels": root / "kernels",
    }
    shutil.rmtree(stubs, ignore_errors=True)
    try:
        stubs.mkdir(parents=True)
        for name, path in sources.items():
            if name not in ("__init__.py", "__pycache__", "py.typed"):
                (stubs / name).symlink_to(path, path.is_dir())
    except OSError:
        return False
    return True


setup(
    cmdclass={"editable_wheel": TypedEditable},
    packages=[
        "fastformer",
        "fastformer.cache",
        "fastformer.decoding",
        "fastformer.dispatch",
        "fastformer.dispatch.sharding",
        "fastformer.distributed",
        "fastformer.drop_in",
        "fastformer.drop_in.replacements",
        "fastformer.kernels",
        "fastformer.kernels.attention",
        "fastformer.kernels.cross_entropy",
        "fastformer.kernels.layer_norm",
        "fastformer.nn",
        "fastformer.ops",
        "fastformer.ops.attention",
        "fastformer.ops.embedding",
        "fastformer.ops.feed_forward",
        "fastformer.ops.loss",
        "fastformer.ops.norms",
        "fastformer.ops.rotary",
        "fastformer.training",
    ],
    package_dir={
        "fastformer": "fastformer",
        "fastformer.kernels": "kernels",
        "fastformer.kernels.attention": "kernels/attention",
        "fastformer.kernels.cross_entropy": "kernels/cross_entropy",
        "fastformer.kernels.layer_norm": "kernels/layer_norm",
    },
)
