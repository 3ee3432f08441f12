"""How a call of an op runs."""
