"""From a trained model to sequences: greedy decoding, sampling, and beam search.

All three run one loop over the steps of a model, which give the log-probabilities of the token
after those so far. An `EncoderDecoder` continues a start symbol, given a source; a language model,
as `make_decoder` gives, continues its prompt. The steps read a `DecoderCache`, or compute all
tokens again where a model takes no cache.

Shapes: B sequences, K beams, R rows that the model computes, B or B K; S source length, V tokens.
"""
