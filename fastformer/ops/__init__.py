"""The ops, by family: of each its contract, its reference and its record."""
