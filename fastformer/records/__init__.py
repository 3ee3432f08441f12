"""The records of the ops: importing this package registers every op with the dispatch."""

from fastformer.records import attention, embedding, feed_forward, loss, norms

__all__ = ["attention", "embedding", "feed_forward", "loss", "norms"]
