"""The records of the ops: importing this module registers every op with the dispatch."""

# ruff: noqa: F401

from fastformer.ops.attention import record as attention
from fastformer.ops.embedding import record as embedding
from fastformer.ops.feed_forward import record as feed_forward
from fastformer.ops.loss import record as loss
from fastformer.ops.norms import record as norms
from fastformer.ops.rotary import record as rotary
