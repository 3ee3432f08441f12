"""Attention: padded, packed, and over pages."""
