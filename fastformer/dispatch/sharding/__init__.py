"""How the ops run on DTensors: each device computes its shard by the same op, and draws there the
dropout masks of the whole.

`backends.run` calls `run` where an argument is a DTensor. The rule in the record of an op names the
dimensions of each tensor by letters, as in an einsum, and the letters over which the op may be
split:

    scaled_dot_product_attention    query bhqd, key bhkd, value bhke -> bhqe    over b, h and q
    layer_norm                      input 012.., weight .. -> 012..             over the rows 0 1 2
    feed_forward                    input 012d, w_1 fd, w_2 of -> 012o          over f and the rows

For each dimension of the mesh the arguments' placements choose one letter. A tensor that has the
letter is then sharded there, and the others are replicated; what is split over a letter that the
output lacks is a partial sum. DTensor redistributes the arguments to these placements: it reduces
partial sums, and exchanges one sharded dimension for another. It gathers an argument in full only
where the rule says so - the tokens that enter a layer whose weights are sharded - and every other
such argument is refused by name. The gradients are those of DTensor: that of a sharded argument is
sharded, and that of a replicated one is summed over the devices.

The rules stand in front of both backends. torch's `register_sharding` would know the registered ops
of the kernels alone, and gives an op no way to learn where its shard begins.

Source: the placements: Shoeybi et al. 2019, "Megatron-LM", section 3; the split of the tokens:
Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section
4.2.
"""
