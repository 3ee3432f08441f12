"""Training: batches, loss, schedule and epochs, and the copy task."""
