"""Maps the top-level folder kernels/ to the package fastformer.kernels, and the measurements of
GPUs, if there are any, to fastformer.measurements; everything else is in pyproject.toml.
"""

from pathlib import Path

from setuptools import find_packages, setup

MEASURED = "benchmarks/results/tuning"
measurements = ["fastformer.measurements"] if any(Path(MEASURED).glob("*.json")) else []

setup(
    py_modules=["fastformer_command"],
    packages=[
        *find_packages(include=["fastformer*"]),
        "fastformer.kernels",
        *(f"fastformer.kernels.{name}" for name in find_packages("kernels")),
        *measurements,
    ],
    package_dir={"fastformer.kernels": "kernels", "fastformer.measurements": MEASURED},
)
