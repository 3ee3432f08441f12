"""Attention: padded and packed."""
