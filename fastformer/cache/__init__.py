"""Caches of keys and values, with which a decoder computes each token once."""
