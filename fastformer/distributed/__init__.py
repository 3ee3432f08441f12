"""Shard a model, or its sequences, over several devices."""
