"""The records of the ops: importing this module registers every op with the dispatch."""

# ruff: noqa: F401

from fastformer.ops.attention import record as attention
from fastformer.ops.embedding import contract as embedding
from fastformer.ops.feed_forward import contract as feed_forward
from fastformer.ops.loss import contract as loss
from fastformer.ops.norms import contract as norms
from fastformer.ops.rotary import contract as rotary
