"""From a trained model to sequences: greedy decoding, sampling, and beam search.

All three run the same loop over the steps of a model; each step gives the log-probabilities of the
next token. An `EncoderDecoder` continues a start symbol, given a source; a language model, as
`make_decoder` builds it, continues its prompt. The steps use a `DecoderCache`, or recompute all
tokens if the model takes no cache.

Shapes: B sequences, K beams, R rows that the model computes, B or B K; S source length, V tokens.
"""
