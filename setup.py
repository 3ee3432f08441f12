"""Maps the top-level folder kernels/ to the package fastformer.kernels, and the measurements of
GPUs to fastformer.measurements; everything else is in pyproject.toml.
"""

from setuptools import setup

setup(
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
        "fastformer.measurements",
        "fastformer.nn",
        "fastformer.ops",
        "fastformer.ops.attention",
        "fastformer.ops.embedding",
        "fastformer.ops.feed_forward",
        "fastformer.ops.loss",
        "fastformer.ops.norms",
        "fastformer.training",
        "fastformer.tuning",
    ],
    package_dir={
        "fastformer": "fastformer",
        "fastformer.kernels": "kernels",
        "fastformer.kernels.attention": "kernels/attention",
        "fastformer.kernels.cross_entropy": "kernels/cross_entropy",
        "fastformer.kernels.layer_norm": "kernels/layer_norm",
        "fastformer.measurements": "benchmarks/results/tuning",
    },
)
