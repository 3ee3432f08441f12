"""The rewriter of graphs: puts fastformer's ops into the graph of any model."""
