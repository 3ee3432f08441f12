"""Maps the top-level folder kernels/ to the package fastformer.kernels; everything else is in
pyproject.toml.
"""

from setuptools import setup

setup(
    packages=[
        "fastformer",
        "fastformer.replacements",
        "fastformer.kernels",
        "fastformer.kernels.attention",
    ],
    package_dir={
        "fastformer": "fastformer",
        "fastformer.kernels": "kernels",
        "fastformer.kernels.attention": "kernels/attention",
    },
)
