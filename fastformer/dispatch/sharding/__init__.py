"""How the ops run on DTensors, and on the rows of a larger call."""
