"""`tune`: the measurement of what is fastest on this GPU."""
