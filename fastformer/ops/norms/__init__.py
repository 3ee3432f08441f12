"""The norms, alone and behind a sum."""
