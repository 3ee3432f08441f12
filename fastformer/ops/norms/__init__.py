"""The norms, alone and after a residual sum."""
