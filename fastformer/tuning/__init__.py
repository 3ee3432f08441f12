"""`tune`: measure which kernels and options are fastest on this GPU."""
