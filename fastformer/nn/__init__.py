"""The layers of the standard Transformer, and whole models."""
