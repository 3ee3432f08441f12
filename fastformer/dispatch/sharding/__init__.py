"""Run the ops on DTensors: each device runs the same op on its shard, with the dropout mask of the
unsharded call.

`backends.run` calls `placements.run_sharded` if an argument is a DTensor. The sharding rule of an
op names each tensor dimension by a letter, as in an einsum, and lists the dimensions over which the
op may be sharded:

    scaled_dot_product_attention    query bhqd, key bhkd, value bhke -> bhqe    over b, h and q
    layer_norm                      input 012.., weight .. -> 012..             over the rows 0 1 2
    feed_forward                    input 012d, w_1 fd, w_2 of -> 012o          over f and the rows

For each dimension of the mesh, the placements of the arguments determine one of these dimensions.
Tensors that have it are sharded, and the others are replicated. If the output does not have it, the
output is a partial sum. DTensor redistributes the arguments to these placements: it reduces partial
sums, and exchanges one sharded dimension for another. An argument is gathered in full only
if the rule says so, such as the tokens that enter a layer with sharded weights; any other argument
that would have to be gathered raises an error with its name. Gradients are placed as DTensor does:
the gradient of a sharded argument is sharded, the gradient of a replicated one is summed over the
devices.

The rules apply before the choice of the backend. torch's `register_sharding` would cover only the
registered ops of the kernels, and tells no op the offset of its shard.

Source: the placements: Shoeybi et al. 2019, "Megatron-LM", section 3; the split of the tokens:
Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section
4.2.
"""
