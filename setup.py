"""Maps the top-level folder kernels/ to the package fastformer.kernels; everything else is in
pyproject.toml.
"""

from setuptools import find_packages, setup

setup(
    py_modules=["fastformer_command"],
    packages=[
        *find_packages(include=["fastformer*"]),
        "fastformer.kernels",
        *(f"fastformer.kernels.{name}" for name in find_packages("kernels")),
    ],
    package_dir={"fastformer.kernels": "kernels"},
)
