"""Training: batches, loss, learning-rate schedule, epochs, and the copy task."""
