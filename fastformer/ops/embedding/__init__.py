"""Embedding, scale, positions and dropout."""
