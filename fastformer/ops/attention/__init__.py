"""Attention: padded, packed, and paged."""
