"""Choose how a call of an op runs: backend, gradient, measurements and DTensors."""
