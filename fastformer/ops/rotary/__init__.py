"""Rotary positions, with the norms of queries and keys."""
