"""From a trained model to sequences: greedy decoding, sampling, and beam search."""
