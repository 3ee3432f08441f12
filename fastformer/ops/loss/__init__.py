"""The label-smoothed loss, of logits or of a linear layer."""
