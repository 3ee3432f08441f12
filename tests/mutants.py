"""Bugs to plant in the kernels: what the tests have to see.

By kernel: name: (function, what stands there, what is planted). The function may stand in
kernels/common.py or launch.py. `PLANTED` are caught by a quick check beside the
kernel's tests, which compiles the function anew in this process; `MORE`, in the launchers and where
it takes a test of its own, by `python -m benchmarks.proof.mutation`, which runs the tests on a copy
with all of both, one at a time.
"""

PLANTED = {
    "attention": {
        "scale off by 5%": (
            "prepare_call",
            "scale = factors.scale * LOG2E\n",
            "scale = factors.scale * LOG2E * 1.05\n",
        ),
        "scale forgotten in dq": ("backward_dq_kernel", "dq = dq * factors.scale", "dq = dq"),
        "scale forgotten in dk": ("backward_dkdv_kernel", "dk = dk * factors.scale", "dk = dk"),
        "mask inverted": (
            "scores",
            "load_where(pointers, exists, EDGE) != 0",
            "load_where(pointers, exists, EDGE) == 0",
        ),
        "key mask inverted": ("key_row", "exists, EDGE) != 0", "exists, EDGE) == 0"),
        "causal off by one": (
            "scores",
            "j <= i + (shift + band.right)",
            "j < i + (shift + band.right)",
        ),
        "window off by one": (
            "scores",
            "j >= i + (shift - band.left)",
            "j > i + (shift - band.left)",
        ),
        "last keys of the band": (
            "keys_of_rows",
            "i1 + shift + band.right",
            "i0 + shift + band.right",
        ),
        "first keys of the band": (
            "keys_of_rows",
            "shift - band.left, 0)",
            "shift - band.left + tile.columns, 0)",
        ),
        "whole tiles beyond the band": (
            "unmasked_tiles",
            "clamp(i0 + shift + band.right + 1",
            "clamp(i0 + tile.columns",
        ),
        "cut tiles taken for whole": (
            "unmasked_tiles",
            "i0 + tile.rows - 1 + shift - band.left",
            "i0 + shift - band.left",
        ),
        "queries of the band in dk": (
            "_queries_of_keys",
            "lo = tl.maximum(n0 - shift",
            "lo = tl.maximum(n0 + tile.rows",
        ),
        "last queries of the window": (
            "_queries_of_keys",
            "n0 + tile.columns - shift + band.left",
            "n0 - shift + band.left",
        ),
        "shift of dq": ("backward_dq_kernel", "sequence.shift", "sizes.keys - queries"),
        "head offset": (
            "forward_kernel",
            "b * strides.query_batch + h * strides.query_head",
            "b * strides.query_batch",
        ),
        "head offset of the keys": (
            "locate_keys",
            "inputs.key + b * strides.key_batch + g * strides.key_head",
            "inputs.key + b * strides.key_batch",
        ),
        "batch offset": (
            "backward_dkdv_kernel",
            "inputs.value + b * strides.value_batch",
            "inputs.value",
        ),
        "key-value head of a group": (
            "locate_rows",
            "h // sizes.group",
            "h % (sizes.heads // sizes.group)",
        ),
        "a head of the group lost": (
            "backward_dkdv_kernel",
            "tl.range(0, sizes.group)",
            "tl.range(0, 1)",
        ),
        "length ignored": (
            "locate_sequence",
            "length = clamp(tl.load(",
            "length = sizes.keys + 0 * clamp(tl.load(",
        ),
        "dropout not rescaled": ("forward_kernel", "(factors.inv_keep / sums)", "(1.0 / sums)"),
        "dropout in dv not rescaled": (
            "backward_dkdv_kernel",
            "dv = dv * factors.inv_keep",
            "dv = dv",
        ),
        "dropout in dp not rescaled": (
            "_dkdv_tiles",
            "tl.where(keep, dp, 0.0) * inv_keep",
            "tl.where(keep, dp, 0.0)",
        ),
        "dropout of another head": (
            "locate_head",
            "dropout_stream(call.seed, batch_head)",
            "dropout_stream(call.seed, batch_head + 1)",
        ),
        "dropped elements kept": ("forward_tiles", "head.call.factors.inv_keep * 0.0", "p"),
        "gradient dropped elsewhere": ("_score_gradient", "head, i0, n0,", "head, i0 + 16, n0,"),
        "dropout of another tile": (
            "forward_tiles",
            "work.start, n0,",
            "work.start, n0 + tile.columns,",
        ),
        "no rescaling of the sum": ("forward_tiles", "l = l * rescale +", "l = l +"),
        "no rescaling of the output": (
            "forward_tiles",
            "acc = acc * rescale[:, None]",
            "acc = acc",
        ),
        "wrong delta": ("_dkdv_tiles", "dp - delta[None, :]", "dp"),
        "dlse forgotten": ("delta_kernel", "delta -= tl.load(", "delta -= 0 * tl.load("),
        "lse in base 2": ("store_sums", "tl.math.log2(sums)) * LN2", "tl.math.log2(sums))"),
        "a key lost at the edge": (
            "forward_tiles",
            "inside = j < head.sequence.length",
            "inside = j < head.sequence.length - 1",
        ),
        "bias in base e": ("in_base_2", "bias.to(ACC) * LOG2E", "bias.to(ACC)"),
        "sink of another head": ("forward_kernel", "tl.load(SINKS + h)", "tl.load(SINKS)"),
        "sink in base e": (
            "forward_kernel",
            "SINKS + h).to(tile.acc) * LOG2E",
            "SINKS + h).to(tile.acc)",
        ),
        "sink without weight": (
            "forward_kernel",
            'float("-inf"), 0.0, 1.0)',
            'float("-inf"), 0.0, 0.0)',
        ),
        "maximum forgotten": ("_probabilities", "s -= statistics.peak[:, None]", "s = s"),
        "maximum forgotten in dk": ("_dkdv_tiles", "s -= peak[None, :]", "s = s"),
        "bias of another head": (
            "locate_head",
            "b * strides.bias_batch + h * strides.bias_head",
            "b * strides.bias_batch",
        ),
        "key bias of another head": (
            "backward_dkdv_kernel",
            "batch_head, b, h, 0,",
            "batch_head, b, g, 0,",
        ),
        "bias gradient of one batch": (
            "backward_dbias_kernel",
            "own_b + member // over.heads",
            "own_b",
        ),
        "bias gradient of one head": (
            "backward_dbias_kernel",
            "own_h + member % over.heads",
            "own_h",
        ),
        "bias gradient in another row": (
            "backward_dbias_kernel",
            "base = base + first * dbias_strides.row",
            "base = base",
        ),
        "bias gradient outside the band": (
            "_members_of_tile",
            "tl.where((n0 >= lo) & (n0 < hi), end, 0)",
            "1",
        ),
        "key bias gradient overwritten": ("_dkdv_tiles", "dbias += tl.sum", "dbias = tl.sum"),
        "softcap's derivative": ("_dkdv_tiles", "1.0 - tanh * tanh", "1.0 - tanh"),
        "softcap's derivative in dq": (
            "_dq_tiles",
            "ds = ds * (1.0 - tanh * tanh)",
            "ds = ds",
        ),
        "alibi without its shift": ("scores", "tl.abs(i + shift - j)", "tl.abs(i - j)"),
        "alibi signed": ("scores", "tl.abs(i + shift - j)", "(i + shift - j)"),
        "packed queries": (
            "forward_kernel",
            "first = sequence.first_query + i0",
            "first = sequence.first_key + i0",
        ),
        "packed keys": (
            "locate_keys",
            "key += sequence.first_key * strides.key_row",
            "key += 0",
        ),
        "packed bias": (
            "locate_head",
            "bias += sequence.first_key * strides.bias_column",
            "bias += 0",
        ),
        "packed bias gradient": (
            "first_key",
            "sizes.key_rows + sequence.first_key",
            "sizes.key_rows",
        ),
        "packed statistics": (
            "first_row",
            "sizes.query_rows + sequence.first_query",
            "sizes.query_rows",
        ),
    },
    "layer_norm": {
        "biased variance for unbiased": ("_reciprocal", "(N - 1)", "N"),
        "unbiased variance for biased": (
            "_reciprocal",
            "squares / N + eps",
            "squares / (N - 1) + eps",
        ),
        "eps left out": ("_reciprocal", "squares / N + eps", "squares / N"),
        "wrong c": ("_coefficient", "((N - 1) *", "(N *"),
        "no mean of g": (
            "backward_kernel",
            "g - _mean(tl.sum(g, 1), N, case.rms)[:, None] -",
            "g -",
        ),
        "no c": ("backward_wide_dx_kernel", "- xhat * coefficient", "- 0.0 * coefficient"),
        "a run of rows lost": ("backward_kernel", "dw += dy * xhat", "dw = dy * xhat"),
        "bias gradient not summed": ("backward_kernel", "db += dy", "db = dy"),
        "wide weights not summed": ("backward_wide_weights_kernel", "dw += dy", "dw = dy"),
        "stale mean": (
            "_read_statistics",
            "tl.load(statistics.mean + rows,",
            "tl.load(statistics.mean + rows * 0,",
        ),
        "row offset": (
            "_sum",
            "x = _tile(inputs.x, rows, strides.x,",
            "x = _tile(inputs.x, rows, size.M,",
        ),
        "residual forgotten": (
            "_sum",
            "x + _tile(inputs.residual,",
            "x + 0.0 * _tile(inputs.residual,",
        ),
        "dropout not rescaled": ("drop_rows", "x * inv_keep", "x"),
        "dropout of another column": (
            "row_dropout_keep",
            "o // 4 + tl.arange",
            "o // 4 + 1 + tl.arange",
        ),
        "dropout of another row": ("row_dropout_keep", "j, low, high,", "j, high, high,"),
        "gradient of the sum forgotten": (
            "_store_gradients",
            "dx += _tile(gradients.ds",
            "dx += 0.0 * _tile(gradients.ds",
        ),
        "gradient not dropped": (
            "_store_gradients",
            "dx = drop_rows(dx, rows, o, draw)",
            "dx = dx * draw.dropout.inv_keep",
        ),
        "gradient not rescaled": (
            "_store_gradients",
            "dx = drop_rows(dx, rows, o, draw)",
            "dx = drop_rows(dx, rows, o, draw) / draw.dropout.inv_keep",
        ),
        "a mean in rms": ("_mean", "tl.zeros_like(total)", "total / N"),
    },
    "feed_forward": {
        "torch's GEMM without dropout": (
            "_activated",
            "h, 0.0) * dropout.inv_keep",
            "h * dropout.inv_keep, h)",
        ),
        "torch's GEMM without an activation": (
            "_activated",
            "h = _activate(_load(Z + place, ok, case.acc), case.kind)",
            "h = _load(Z + place, ok, case.acc)",
        ),
        "gate without dropout": (
            "_gated",
            "h, 0.0) * dropout.inv_keep",
            "h * dropout.inv_keep, h)",
        ),
        "gate's halves swapped": ("_gated", "_load(V + _offsets", "_load(Z + _offsets"),
        "gradient of v dropped twice": ("_gated_backward", "dv = dh * f", "dv = dh * h"),
        "gradient of z without v": ("_gated_backward", "dh * v * _deriv", "dh * _deriv"),
        "gated gradient not dropped": (
            "_gated_backward",
            "dh, 0.0) * dropout.inv_keep",
            "dh * dropout.inv_keep, dh)",
        ),
        "bias left out": ("_hidden", "acc += tl.load(B + j", "acc += 0 * tl.load(B + j"),
        "dropout not rescaled": ("_hidden", "h, 0.0) * dropout.inv_keep", "h, 0.0)"),
        "dropout of other rows": ("_hidden", "_keep(SEED, i0, j0,", "_keep(SEED, i0 + 16, j0,"),
        "gradient not rescaled": ("_hidden_backward", "0.0, dh * dropout.inv_keep", "0.0, dh"),
        "mask lost in the backward": ("_hidden_backward", "tl.where(keep, dz", "tl.where(ok, dz"),
        "wrong derivative": (
            "_derivative",
            "s * (1.0 + z * (1.0 - s))",
            "s * (1.0 - z * (1.0 - s))",
        ),
        "gelu without its density": ("_derivative", "+ z * density", "+ 0 * density"),
        "tanh slope": ("_derivative", "0.134145", "0.044715"),
        "a block of k lost": (
            "_hidden",
            "tl.range(0, size.K, tile.features)",
            "tl.range(0, size.K - 1, tile.features)",
        ),
        "relu for silu": ("_activate", "return z * tl.sigmoid(z)", "return tl.maximum(z, 0.0)"),
    },
    "rotary": {
        "turned the other way": (
            "_forward_heads",
            "a * place.cos_a - b * place.sin_a",
            "a * place.cos_a + b * place.sin_a",
        ),
        "one sine for both": ("_forward_heads", "a * place.sin_b", "a * place.sin_a"),
        "one cosine for both": ("_forward_heads", "b * place.cos_b", "b * place.cos_a"),
        "gradient turned forward": (
            "_backward_heads",
            "dy_a * place.cos_a + dy_b * place.sin_b",
            "dy_a * place.cos_a - dy_b * place.sin_b",
        ),
        "gradient by the other sine": (
            "_backward_heads",
            "dy_a * place.sin_a",
            "dy_a * place.sin_b",
        ),
        "halves of the head": (
            "_load_pairs",
            "base + case.rotary // 2 + c",
            "base + case.dim // 2 + c",
        ),
        "a pair too many": ("_load_pairs", "c < case.rotary // 2", "c <= case.rotary // 2"),
        "neighbours past the table": (
            "_load_pairs",
            "ok & (c < case.rotary)",
            "ok & (c < case.rotary - 1)",
        ),
        "neighbours stored in a wrong order": ("_store_pairs", "tl.join(a, b)", "tl.join(b, a)"),
        "second half not stored": (
            "_store_pairs",
            "tl.store(base + case.rotary // 2 + c, b.to",
            "tl.store(base + case.rotary // 2 + c, a.to",
        ),
        "the last feature left out": ("_store_rest", "c < case.dim", "c < case.dim - 1"),
        "the rest not normalised": ("_forward_heads", "rest * r * w_rest", "rest * w_rest"),
        "mean without the rest": (
            "_sum_over_features",
            "total += tl.sum(rest, 1)",
            "total += 0.0",
        ),
        "mean over the rotated features": (
            "_forward_heads",
            "squares / case.dim + eps",
            "squares / case.rotary + eps",
        ),
        "eps outside of the root": (
            "_forward_heads",
            "1.0 / tl.sqrt(squares / case.dim + eps)",
            "1.0 / (tl.sqrt(squares / case.dim) + eps)",
        ),
        "no eps in the backward": (
            "_backward_heads",
            "squares / case.dim + eps",
            "squares / case.dim",
        ),
        "no projection in dx": ("_backward_heads", "(a - x_a * mean) * r", "a * r"),
        "weight forgotten in dx": ("_backward_heads", "a * w_a, b * w_b,", "a * w_a, b,"),
        "dweight of the last head alone": ("_backward_heads", "dw_b += b * x_b", "dw_b = b * x_b"),
        "dweight of the rest": ("_backward_heads", "dw_rest += rest * x_rest", "dw_rest += rest"),
        "partial sums in one place": (
            "_span",
            "tl.program_id(0).to(tl.int64) * chunks + chunk",
            "tl.program_id(0).to(tl.int64) * chunks",
        ),
        "heads of a program lost": ("_span", "first + per_program)", "first + 1)"),
        "token of the batch": ("_place", "(i % size.length)", "(i % (size.length - 1))"),
        "cos of the first sequence": ("_place", "batch * strides.cos_batch", "0 * batch"),
        "sin by the strides of cos": (
            "_place",
            "token * strides.sin_token",
            "token * strides.cos_token",
        ),
        "the first head for all": ("_rows", "strides.head)", "strides.head * 0)"),
        "key by the norm of the query": (
            "forward_kernel",
            "eps, tile, case, case.key_norm)",
            "eps, tile, case, case.query_norm)",
        ),
        "key by the chunks of the query": ("forward_kernel", "chunk - chunks", "chunk"),
        "the last head left out": (
            "backward_kernel",
            "_span(chunk, size.query_heads,",
            "_span(chunk, size.query_heads - 1,",
        ),
    },
    "embedding": {
        "scale forgotten": ("_forward", "to(case.acc) * scale", "to(case.acc)"),
        "position of the row": ("_forward", "(i % size.S)", "(i % (size.S + 1))"),
        "dropout not rescaled": (
            "_forward",
            "drop_rows(y, rows, o, Draw(tl.load(SEED), dropout))",
            "drop_rows(y, rows, o, Draw(tl.load(SEED), dropout)) / dropout.inv_keep",
        ),
        "dropout of another tile": ("_forward", "drop_rows(y, rows, o,", "drop_rows(y, rows, 0,"),
        "gradient not dropped": (
            "_backward",
            "g = drop_rows(g, rows, o, Draw(tl.load(SEED), dropout))",
            "g = g * dropout.inv_keep",
        ),
        "gradient not scaled": ("_backward", "to(case.acc) * scale", "to(case.acc)"),
        "token of another row": ("_forward", "tl.load(T + i,", "tl.load(T + i // 2,"),
    },
    "cross_entropy": {
        "no rescaling": ("_add", "l = l * tl.math.exp2((m - seen) * LOG2E)", "l = l * 1.0"),
        "target of another row": ("loss_kernel", "X + i * strides.x + t,", "X + t,"),
        "padding column counts": (
            "_add",
            "tl.where(k == labels.pad - (row.head + offsets), 0.0, part)",
            "part",
        ),
        "constant forgotten": ("loss_kernel", "loss = constant + log_sum", "loss = log_sum"),
        "smoothing at the target": (
            "loss_kernel",
            "(labels.on - labels.off) * (x_t",
            "labels.on * (x_t",
        ),
        "ignored rows count": (
            "loss_kernel",
            "tl.where(t != labels.ignore_index, loss, 0.0)",
            "loss",
        ),
        "lse in base 2": ("loss_kernel", "tl.math.log(tl.sum", "tl.math.log2(tl.sum"),
        "gradient of ignored rows": (
            "_target",
            "tl.where(t != labels.ignore_index, g, 0.0)",
            "g",
        ),
        "gradient not scaled": ("_store_block", "y * target.g", "y"),
        "gradient of one row's g": ("gradient_kernel", "G + i * strides.g", "G"),
        "gradient of the padding column": (
            "_store_block",
            "tl.where(k == labels.pad - first, 0.0, labels.off)",
            "labels.off",
        ),
        "gradient at the target": (
            "_store_block",
            "labels.on - labels.off, 0.0",
            "labels.on, 0.0",
        ),
        "gradients of the first block": (
            "_store_row",
            "tl.range(0, row.full, block)",
            "tl.range(block, row.full, block)",
        ),
        "what is before the first group": ("_offsets", "-case.group,", "case.group,"),
    },
}

MORE = {
    "attention": {
        "int32 rows": ("_spans_int32", ">= 2**31", ">= 2**62"),
        "int32 batches": (
            "locate_rows",
            "b = (batch_head // sizes.heads).to(tl.int64)",
            "b = batch_head // sizes.heads",
        ),
        "int32 heads": (
            "locate_rows",
            "h = (batch_head % sizes.heads).to(tl.int64)",
            "h = batch_head % sizes.heads",
        ),
        "int32 gradient rows": (
            "BackwardPlan.__init__",
            "self.tile.wide or _spans_int32(grad_output, output)",
            "self.tile.wide",
        ),
        "a sink of minus infinity": (
            "forward_kernel",
            'float("-inf"), 0.0, 1.0)',
            'float("-inf"), 1.0, 1.0)',
        ),
        "gradient of a sink beside a bias": (
            "BackwardPlan.moved",
            "sink * LOG2E.value - peak + offset",
            "sink - peak + offset",
        ),
        "bias of rows beside a sink": ("BackwardPlan.run", "else dbias + moved", "else dbias"),
        "sign of the sinks' gradient": ("BackwardPlan.run", "-moved.sum(", "moved.sum("),
        "dtype of the sinks left out of a plan": (
            "signature_of",
            "else (sinks.dtype, sinks.data_ptr() & 15)",
            "else sinks.data_ptr() & 15",
        ),
        "a row of lse not written": (
            "forward_kernel",
            "row + i, i < queries,",
            "row + i, i < sizes.queries - 1,",
        ),
        "a row of delta not written": (
            "delta_kernel",
            "delta), mask=ok)",
            "delta), mask=i < Sq - 1)",
        ),
        "a row of the output not written": (
            "forward_kernel",
            "i < queries, acc, tile.value_dim",
            "i < queries - 1, acc, tile.value_dim",
        ),
        "a key's gradient not written": (
            "backward_dkdv_kernel",
            "ok = j < keys",
            "ok = j < length",
        ),
        "first tile of a part": ("_part", " + tl.minimum(s, tiles % parts)", ""),
        "last tile of a part": ("_part", "(s < tiles % parts)", "(s <= tiles % parts)"),
        "query of a row": ("split_kernel", "i = r // split.heads", "i = r % sizes.queries"),
        "head of a row": ("split_kernel", "h = first + r % split.heads", "h = first + 0 * r"),
        "key-value head of a tile": (
            "split_kernel",
            "g = first // sizes.group",
            "g = first % (sizes.heads // sizes.group)",
        ),
        "rows past the end of a tile": (
            "split_kernel",
            "tl.store(WEIGHTS + place * 2, l, mask=ok)",
            "tl.store(WEIGHTS + place * 2, l + 0 * s)",
        ),
        "mask of one head for a tile": ("split_kernel", "rows.mask if has.mask == 2 else", ""),
        "bias of one head for a tile": ("split_kernel", "rows.bias if has.bias == 2 else", ""),
        "slope of one head for a tile": ("split_kernel", "bias, rows.slope", "bias, head.slope"),
        "keys of the first queries alone": (
            "split_kernel",
            "end = tl.minimum(start + tile.rows - 1,",
            "end = tl.minimum(start,",
        ),
        "keys of all queries before": ("split_kernel", "i0 = start // split.heads", "i0 = end - 1"),
        "masked values of a part": (
            "split_kernel",
            "MASKED: tl.constexpr = has.mask == 1 or",
            "MASKED: tl.constexpr =",
        ),
        "values of a bias in a part": (
            "split_kernel",
            "has.mask == 1 or has.bias == 1",
            "has.mask == 1",
        ),
        "maximum of a part without the factor": ("split_kernel", "m = m * call.scale", "m = m"),
        "parts merged without the factor": ("merge_kernel", "l += factor * weight", "l += weight"),
        "values merged without the factor": (
            "merge_kernel",
            "acc += factor[:, None] * x",
            "acc += x",
        ),
        "what no part has written": (
            "merge_kernel",
            "            weight != 0.0,\n",
            "            s0 + s < parts,\n",
        ),
        "maximum of the first parts": (
            "merge_kernel",
            "m = tl.maximum(m, tl.load(",
            "m = (tl.load(",
        ),
        "base of a hidden row": ("merge_kernel", 'tl.where(m == float("-inf"), 0.0, m)', "m"),
        "merged sink in base e": (
            "merge_kernel",
            "SINKS + h).to(tile.acc) * LOG2E",
            "SINKS + h).to(tile.acc)",
        ),
        "merged sink of another head": ("merge_kernel", "tl.load(SINKS + h)", "tl.load(SINKS)"),
        "merged sink without weight": (
            "merge_kernel",
            "l += tl.math.exp2(sink - base)",
            "l += 0 * sink",
        ),
        "merged sink above the maximum": ("merge_kernel", "m = tl.maximum(m, sink)", "m = m"),
        "merged row of another head": (
            "merge_kernel",
            "h = row // sizes.queries % sizes.heads",
            "h = row % sizes.queries % sizes.heads",
        ),
        "pages out of range": ("in_pages", "clamp(page, 0, pages.paging.pages - 1)", "(page)"),
        "place in a page": ("in_pages", "place = j % has.page", "place = j % 16"),
        "value of another page": ("in_pages", "page * pages.paging.value_page", "0 * page"),
        "table of the first sequence": (
            "split_kernel",
            "inputs.table + b * paging.blocks",
            "inputs.table",
        ),
        "heads told apart by a mask": ("DecodePlan.__init__", "mask_head != 0", "mask_head < 0"),
        "heads told apart by a bias": ("DecodePlan.__init__", "bias_head != 0", "bias_head < 0"),
        "plan of another table": ("_run_paged", "block_table.shape, block_table", "block_table"),
        "dropout in parts": ("splits_keys", "few and dropout_p == 0 and", "few and"),
        "packed sequences in parts": ("splits_keys", " and not packed", ""),
        "0 / 0 of a hidden row": ("store_sums", "tl.where(empty, 1.0, l)", "l"),
        "lse of a hidden row": (
            "store_sums",
            'tl.where(empty, float("-inf"), (m +',
            "tl.where(empty, 0.0, (m +",
        ),
        "statistics of a hidden row": (
            "delta_kernel",
            'tl.where(empty, float("-inf"), lse * -LOG2E)',
            "lse * -LOG2E",
        ),
        "float16 sums of the output": (
            "forward_tiles",
            "v, acc, tile.precision, out_dtype=tile.acc)",
            "v, acc, tile.precision, out_dtype=tile.acc).to(tl.float16).to(tile.acc)",
        ),
        "float16 sums of dv": (
            "_dkdv_tiles",
            "do, dv, tile.precision, out_dtype=tile.acc)",
            "do, dv, tile.precision, out_dtype=tile.acc).to(tl.float16).to(tile.acc)",
        ),
        "weights in bfloat16": (
            "forward_tiles",
            "p.to(v.dtype)",
            "p.to(tl.bfloat16).to(v.dtype)",
        ),
        "delta in the input's dtype": (
            "delta_kernel",
            "o.to(tile.acc) * do.to(tile.acc)",
            "(o * do).to(tile.acc)",
        ),
        "stale maximum": ("forward_tiles", "        m = m_new\n", "        m = m\n"),
        "dq of the last tile alone": (
            "_dq_tiles",
            "k, dq, tile.precision",
            "k, dq * 0.0, tile.precision",
        ),
        "dk of the last tile alone": (
            "_dkdv_tiles",
            "q, dk, tile.precision",
            "q, dk * 0.0, tile.precision",
        ),
        "a bias of -inf in all of a tile": (
            "forward_tiles",
            "if EDGE or has.mask > 0 or has.bias > 0:",
            "if EDGE or has.mask > 0:",
        ),
        "a hidden value reaches the output": (
            "_forward_keys",
            "if MASKED and tile.recompute_masked:",
            "if False:",
        ),
        "a hidden key reaches dq": (
            "backward_dq_kernel",
            "if MASKED and tile.recompute_masked:",
            "if False:",
        ),
        "a hidden key is read again": ("_dq_tiles", "keys.ok if SKIP else inside", "inside"),
        "a hidden value is read again": (
            "forward_tiles",
            "keys.ok if SKIP else inside",
            "inside",
        ),
        "a hidden value reaches dk": (
            "backward_dkdv_kernel",
            "c, stride, ok, tile.value_dim",
            "c, stride, inside, tile.value_dim",
        ),
        "a hidden value reaches the gradient of its bias": (
            "backward_dbias_kernel",
            "tl.where(keys.ok[None, :], dp, 0.0)",
            "dp",
        ),
        "masked keys of wide heads": (
            "backward_dq_kernel",
            "MASKED and not tile.recompute_masked",
            "False",
        ),
        "maximum without the factor": ("forward_kernel", "m = m * call.scale", "m = m"),
        "sink times the factor": ("forward_kernel", "m = m / call.scale", "m = m"),
        "a negative factor folded": ("Plan", "attention.scale > 2.0**-100", "True"),
        "rows past the end in dk": (
            "_row_statistics",
            "tl.load(pointers.delta + i, mask=ok, other=0.0)",
            "tl.load(pointers.delta + tl.minimum(i, queries - 1))",
        ),
        "rows past the end in dv": (
            "_dkdv_tiles",
            "rows.grad_stride, ok, tile.value_dim, tile.value_block, True",
            "rows.grad_stride, None, tile.value_dim, tile.value_block, False",
        ),
        "cut tiles of dk taken for whole": (
            "_queries_of_keys",
            "unmasked_begin = tl.maximum(n0 + tile.columns - 1",
            "unmasked_begin = tl.maximum(n0",
        ),
        "cut tiles of dk taken for whole at the left": (
            "_queries_of_keys",
            "unmasked_end = tl.maximum(n0 -",
            "unmasked_end = tl.maximum(n0 + tile.rows -",
        ),
        "keys past the length in a whole tile of dk": (
            "_queries_of_keys",
            "tl.where(\n        n0 + tile.columns > sequence.length, hi, "
            "clamp(unmasked_begin, lo, hi)\n    )",
            "clamp(unmasked_begin, lo, hi)",
        ),
        "a hidden key under a softcap": ("scores", "tl.where(ok, tanh, 0.0)", "tanh"),
        "cut tile taken for whole at the end": (
            "unmasked_tiles",
            "unmasked_end = unmasked_end // tile.columns * tile.columns",
            "full = full",
        ),
        "tiles that begin anywhere": (
            "keys_of_rows",
            "tl.maximum(i0 + shift - band.left, 0) // tile.columns * tile.columns",
            "tl.maximum(i0 + shift - band.left, 0)",
        ),
        "columns past the head dim": (
            "store_rows",
            "mask = mask & (d < D)[None, :]",
            "mask = mask",
        ),
        "head map of the gradient": (
            "backward_dkdv_kernel",
            "h = g * sizes.group + member",
            "h = g + member * groups",
        ),
        "group size": (
            "Plan.__init__",
            "group = self.heads // max(1, self.groups)",
            "group = self.groups",
        ),
        "stride of the key for the value": (
            "Plan.__init__",
            "*self.strides(key), *self.strides(value)",
            "*self.strides(key), *self.strides(key)",
        ),
        "strides of mask and bias swapped": (
            "Plan.__init__",
            "*strides[0], *strides[1],",
            "*strides[1], *strides[0],",
        ),
        "slopes of one batch": (
            "Plan.__init__",
            "attention.alibi_slopes.expand(self.batch, self.heads).stride()",
            "(0, attention.alibi_slopes.stride(-1))",
        ),
        "mask of one query for all": (
            "Plan.__init__",
            "x.stride(2) == 0 or",
            "x.stride(2) < 2 or",
        ),
        "mask of a single query": ("Plan.__init__", " or q_rows == 1 else 2)", " else 2)"),
        "an unbounded window": ("Plan.__init__", "min(n, UNBOUNDED)", "n"),
        "causal forgets its window": (
            "Plan.__init__",
            "            right = 0\n",
            "            left, right = UNBOUNDED, 0\n",
        ),
        "grid a block short": (
            "Plan.rows",
            "triton.cdiv(self.q_length, tiles.BM)",
            "max(1, self.q_length // tiles.BM)",
        ),
        "grid a key block short": (
            "Plan.columns",
            "triton.cdiv(self.k_length, tiles.BN)",
            "max(1, self.k_length // tiles.BN)",
        ),
        "a bias gradient alone": (
            "BackwardPlan.__init__",
            "needs[1] or needs[2] or key_grad",
            "needs[1] or needs[2]",
        ),
        "strided dlse": ("BackwardPlan.run", "grad_lse.contiguous()", "grad_lse"),
        "dlse of a hidden row": (
            "BackwardPlan.run",
            'dbias.masked_fill(lse == float("-inf"), 0.0)',
            "dbias",
        ),
        "bias gradient of all heads": (
            "BackwardPlan.add_dbias",
            "query.shape[1] // max(1, h))",
            "query.shape[1])",
        ),
        "bias gradient in float16": (
            "BackwardPlan.room_for_dbias",
            "return lse.new_empty(query.shape[0]",
            "return bias.new_empty(query.shape[0]",
        ),
        "strides left out of the key of a plan": ("signature_of", "        key.stride(),\n", ""),
        "options left out of the key of a plan": (
            "signature_of",
            "        scale,\n        window,\n        alignment,\n        softcap,\n",
            "",
        ),
        "gradient's layout left out of the key": (
            "_run_backward",
            "tensors = grad_output, grad_lse,",
            "tensors = grad_lse,",
        ),
        "needs left out of the key": (
            "_run_backward",
            "*map(layout, tensors), needs",
            "*map(layout, tensors)",
        ),
        "output's layout left out of the key": (
            "_run_backward",
            "grad_lse, output, lse, statistics  #",
            "grad_lse, lse, statistics  #",
        ),
        "lse's layout left out of the key": (
            "_run_backward",
            "grad_lse, output, lse, statistics  #",
            "grad_lse, output, statistics  #",
        ),
        "a strided last dimension": (
            "_run_forward",
            "map(unit_stride, given)",
            "given",
        ),
        "a length past the keys": (
            "locate_sequence",
            "length = clamp(tl.load(optional.lengths + b).to(tl.int32), 0, length)",
            "length = tl.load(optional.lengths + b).to(tl.int32)",
        ),
        "the same order of causal rows": (
            "locate_block",
            "block = blocks - 1 - block",
            "block = block",
        ),
        "order: two programs for a block": (
            "locate_block",
            "tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)",
            "tl.program_id(2) + tl.program_id(0)",
        ),
        "order: the longest last of a window to the left": (
            "locate_block",
            "(has.right or not has.left) == LAST_IS_LONGEST",
            "LAST_IS_LONGEST",
        ),
        "order: heads past the last section": (
            "heads_of_section",
            "while heads % sections:",
            "while sections < 1:",
        ),
        "order: sections past the cache": ("heads_of_section", "cache // max(1, size)", "heads"),
        "order: the heads of a group in several sections": (
            "Plan.grid",
            "return section * share, blocks, groups // section",
            "return section, blocks, groups * share // section",
        ),
        "order: more programs than an axis has": (
            "Plan.grid",
            "max(blocks, groups // section) <= MOST_PROGRAMS",
            "MOST_PROGRAMS > 0",
        ),
        "order: dK and dV by the queries of one head": (
            "Plan.columns",
            'self.q_length * self.arguments["sizes"].group',
            "self.q_length",
        ),
        "keys past the length walked": (
            "_queries_of_keys",
            "tl.where(n0 < sequence.length, tl.maximum(lo, hi), lo)",
            "tl.maximum(lo, hi)",
        ),
        "the next sequence's packed keys": (
            "locate_sequence",
            "k1 = clamp(tl.load(optional.lengths + b + 1).to(tl.int32), k0, sizes.key_rows)",
            "k1 = sizes.key_rows",
        ),
        "packed batch stride": ("Plan.strides", "0 if self.packed else batch", "batch"),
        "bounds: one tile too late": (
            "split_at_run",
            "bounds.first // width * width",
            "bounds.first // width * width + width",
        ),
        "bounds: the last tile lost": (
            "split_at_run",
            "tl.minimum(hi, bounds.last)",
            "tl.minimum(hi, bounds.last - width)",
        ),
        "bounds: the last key lost": (
            "bounds_kernel",
            "tl.where(seen > 0, index + 1, last)",
            "tl.where(seen > 0, index, last)",
        ),
        "bounds: first and last exchanged": (
            "load_bounds",
            "Bounds(tl.load(place), tl.load(place + 1), tl.load(place + 2), tl.load(place + 3))",
            "Bounds(tl.load(place + 3), tl.load(place + 1), tl.load(place + 2), tl.load(place))",
        ),
        "bounds: a row past the end is read": (
            "bounds_kernel",
            "ok = (i < sizes.queries) & (j < sizes.keys // W)",
            "ok = j < sizes.keys // W",
        ),
        "bounds: the last tile counts as a whole one": (
            "bounds_kernel",
            "owned = tl.minimum(own_size - own, OWN)",
            "owned = OWN",
        ),
        "bounds: what is past the end cuts": (
            "bounds_kernel",
            "((free < owned) & (index < size))",
            "(free < owned)",
        ),
        "bounds: a run begins at its cut": (
            "bounds_kernel",
            "tl.where(cut, start + STEP, begin)",
            "tl.where(cut, start, begin)",
        ),
        "bounds: the last run": (
            "bounds_kernel",
            "start + STEP - begin > run_end - run_begin",
            "start + STEP > begin",
        ),
        "bounds: another head": (
            "bounds_kernel",
            "(owner % sizes.heads).to(tl.int64) * strides.head",
            "(owner % sizes.heads // 2).to(tl.int64) * strides.head",
        ),
        "bounds: another batch stride": (
            "bounds_kernel",
            "(owner // sizes.heads).to(tl.int64) * strides.batch",
            "(owner // sizes.heads).to(tl.int64) * strides.head",
        ),
        "bounds: int32 rows": ("bounds_kernel", "if reading.wide:", "if False:"),
        "bounds: int32 batches": (
            "bounds_kernel",
            "(owner // sizes.heads).to(tl.int64)",
            "(owner // sizes.heads)",
        ),
        "bounds: int32 heads": (
            "bounds_kernel",
            "(owner % sizes.heads).to(tl.int64)",
            "(owner % sizes.heads)",
        ),
        "bounds: read of another sequence": (
            "load_bounds",
            "b * strides.bounds_batch",
            "0 * strides.bounds_batch",
        ),
        "bounds: read of another head": (
            "load_bounds",
            "h * strides.bounds_head",
            "0 * strides.bounds_head",
        ),
        "bounds: read of the tile before": (
            "load_bounds",
            "index * strides.bounds_tile",
            "tl.maximum(index - 1, 0) * strides.bounds_tile",
        ),
        "bounds: strides along a size of 1": ("BoundedLaunch.strides", "step * (n > 1)", "step"),
        "bounds: the bytes of a word in reverse": (
            "_count",
            "shifts = tl.arange(0, 4) * 8",
            "shifts = 24 - tl.arange(0, 4) * 8",
        ),
        "bounds: a byte of 128 is lost": (
            "_count",
            "((x | ((x & 0x7F7F7F7F) + 0x7F7F7F7F)) >> 7)",
            "(((x & 0x7F7F7F7F) + 0x7F7F7F7F) >> 7)",
        ),
        "bounds: a byte of 1 alone": (
            "_count",
            "((x | ((x & 0x7F7F7F7F) + 0x7F7F7F7F)) >> 7) & 0x01010101",
            "x & 0x01010101",
        ),
        "bounds: words that are not aligned": (
            "bounds_source",
            "(*strides[:3], keys, x.data_ptr())",
            "(*strides[:3], keys)",
        ),
        "bounds: words of another width": (
            "bounds_source",
            "(*strides[:3], keys, x.data_ptr())",
            "(*strides[:3], x.data_ptr())",
        ),
        "bounds: any bias is free": ("_count", "(x == 0)", "(x == x)"),
        "bounds: the jump not taken": (
            "forward_tiles",
            "n0 = tl.where(n0 < jump, n0, n0 + gap)",
            "n0 = n0 + 0",
        ),
        "bounds: the jump of dq not taken": (
            "_dq_tiles",
            "n0 = tl.where(n0 < jump, n0, n0 + gap)",
            "n0 = n0 + 0",
        ),
        "bounds: the jump of dk not taken": (
            "_dkdv_tiles",
            "i0 = tl.where(i0 < jump, i0, i0 + gap)",
            "i0 = i0 + 0",
        ),
        "bounds: the gap a tile too long": (
            "split_at_run",
            "gap = end - begin",
            "gap = end - begin + width",
        ),
        "bounds: no run": (
            "split_at_run",
            "end = tl.maximum(tl.minimum(end, hi), begin)",
            "end = begin",
        ),
        "bounds: a run begins before a tile that the band cuts": (
            "split_at_run",
            "tl.cdiv(tl.minimum(tl.maximum(begin, lo), hi), width) * width",
            "tl.minimum(tl.maximum(begin, lo), hi) // width * width",
        ),
        "bounds: a run beside a bias reads no mask": (
            "inside_run",
            'elif has.bias == 0:\n        known["mask"] = 0',
            'else:\n        known["mask"] = 0',
        ),
        "bounds: queries behind the run lost": (
            "_dkdv_of_head",
            "lo, hi + gap, jump, 0",
            "lo, hi, jump, 0",
        ),
        "bounds: a key that one of the queries sees is free": (
            "load_bounds_of_keys",
            "bounds.run_end > 0, queries, 0",
            "bounds.last > 0, queries, 0",
        ),
        "bounds: the last member lost": (
            "members_that_see",
            "tl.where(seen, member + 1, 0)",
            "tl.where(seen, member, 0)",
        ),
        "bounds: members of a tile beside it": (
            "members_that_see",
            "n0 + tile.columns > tl.load(",
            "n0 > tl.load(",
        ),
        "bounds: members past 128 lost": (
            "members_that_see",
            "tl.range(0, shared.members, 128)",
            "tl.range(0, tl.minimum(shared.members, 128), 128)",
        ),
        "bounds: members of another head": (
            "members_that_see",
            "(shared.head + member % shared.heads) * strides.bounds_head",
            "shared.head * strides.bounds_head",
        ),
        "bounds: not read by few queries": ("split_kernel", "if has.bounds:", "if False:"),
        "bounds: the last tile of few queries lost": (
            "split_kernel",
            "tl.minimum(hi, bounds.last)",
            "tl.minimum(hi, bounds.last - tile.columns)",
        ),
        "bounds: more queries than a byte counts": (
            "DecodePlan.may_read",
            " and source.sizes.queries <= 128",
            "",
        ),
    },
    "layer_norm": {
        "int32 rows": ("forward_kernel", "rows = i.to(tl.int64)", "rows = i"),
        "int32 rows in the backward": (
            "backward_kernel",
            "(first + o + tl.arange(0, tile.rows)).to(tl.int64)",
            "first + o + tl.arange(0, tile.rows)",
        ),
        "a mean not written": (
            "forward_kernel",
            "mean, mask=i < size.M)",
            "mean, mask=i < size.M - 1)",
        ),
        "stale r": (
            "forward_kernel",
            "tl.store(statistics.reciprocal + i, r,",
            "tl.store(statistics.reciprocal + i, mean,",
        ),
        "padding in the variance": (
            "forward_kernel",
            "tl.where((c < N)[None, :], x - mean[:, None], 0.0)",
            "x - mean[:, None]",
        ),
        "padding in a wide variance": (
            "forward_kernel",
            "tl.where((o + c < N)[None, :], x - mean[:, None], 0.0)",
            "x - mean[:, None]",
        ),
        "sum not rounded": ("_sum", "x.to(inputs.residual.dtype.element_ty).to(case.acc)", "x"),
        "weight gradient in bfloat16": (
            "backward_kernel",
            "dw += dy * xhat",
            "dw = (dw + dy * xhat).to(tl.bfloat16).to(case.acc)",
        ),
        "wide sums in float16": (
            "forward_kernel",
            "total += x * x",
            "total = (total + x * x).to(tl.float16).to(case.acc)",
        ),
        "partial sums in the input's dtype": (
            "_run_backward",
            "partial = mean.new_empty(",
            "partial = x.new_empty(",
        ),
        "the last run of rows": (
            "_Backward.__init__",
            "runs = triton.cdiv(rows, per_program)",
            "runs = max(1, rows // per_program)",
        ),
        "rows a block short": (
            "_Forward.__init__",
            "triton.cdiv(rows, tiles.rows)",
            "max(1, rows // tiles.rows)",
        ),
        "a strided last dimension": (
            "as_rows",
            "unit_stride(x.reshape(-1, n))",
            "x.reshape(-1, n)",
        ),
        "stride of the input for the residual": (
            "_Forward.__init__",
            "row_stride(x if residual is None else residual, n)",
            "row_stride(x, n)",
        ),
        "stride of the input for the gradient": (
            "_Backward.__init__",
            "tensors = x, given.grad, given.grad",
            "tensors = x, x, given.grad",
        ),
        "strided weight": (
            "_run_forward",
            "t.contiguous() for t in given[2:]",
            "t for t in given[2:]",
        ),
        "strided weight in the backward": (
            "_run_backward",
            "t.contiguous() for t in given[3:]",
            "t for t in given[3:]",
        ),
        "mean of rms not zero": ("_read_statistics", "return 0.0, r", "return r, r"),
        "weight for bias": (
            "backward",
            "needs[1] or needs[2], needs[2])",
            "needs[1] or needs[2], needs[1])",
        ),
        "sums of one row of a tile": ("_store_sums", "tl.sum(db, 0)", "tl.max(db, 0)"),
        "gradients of the sum swapped": (
            "add_backward",
            "return dinput, dx,",
            "return dx, dinput,",
        ),
        "c of a constant row": (
            "_coefficient",
            "tl.maximum(1.0 - eps * r, 1e-30)",
            "(1.0 - eps * r)",
        ),
        "wide columns of the weights": (
            "_Backward.__init__",
            "(runs, triton.cdiv(n, wide.columns))",
            "(runs, n // wide.columns)",
        ),
        "weight of another block": (
            "_affine",
            "_vector(W, columns, N, case.acc)",
            "_vector(W, columns % 4096, N, case.acc)",
        ),
        "one gradient for two": (
            "backward",
            "needs[1] or needs[2], needs[2])",
            "needs[1], needs[2])",
        ),
    },
    "feed_forward": {
        "rows of another group": ("_hidden", "turn % members", "turn % case.group"),
        "columns of another group": ("_hidden", "turn // members", "turn // case.group"),
        "gradient where relu is zero": ("_hidden_backward", "saved <= 0.0", "saved < 0.0"),
        "float16 sums": (
            "_hidden",
            "acc, case.precision, out_dtype=case.acc)",
            "acc, case.precision, out_dtype=case.acc).to(tl.float16).to(case.acc)",
        ),
        "int32 rows of a tile": ("_hidden", "r, c = r.to(tl.int64),", "r, c = r,"),
        "relu drops NaN": (
            "_hidden_backward",
            "tl.where(saved <= 0.0, 0.0, dh * dropout.inv_keep)",
            "tl.where(saved > 0.0, dh * dropout.inv_keep, 0.0)",
        ),
        "int32 rows": ("_hidden", "X + i0.to(tl.int64) * strides.x", "X + i0 * strides.x"),
        "past the last k": ("_First.__init__", "features % tiles.features == 0", "True"),
        "a strided input": (
            "forward",
            "as_rows(input, input.shape[-1]) if input.numel() else input",
            "input",
        ),
        "a strided weight": ("forward", "unit_stride(w_1)", "w_1"),
        "a strided bias": ("forward", "b_1.contiguous()", "b_1"),
        "stride of the input for the weight": (
            "_First.__init__",
            "stride(0), w_1.stride(0)",
            "stride(0), input.view(rows, features).stride(0)",
        ),
        "h saved for z": (
            "_First.__init__",
            'self.save_z = activation != "relu"',
            'self.save_z = activation == "silu"',
        ),
        "z for h in the weight's gradient": (
            "backward",
            "_gradients(dy, hidden,",
            "_gradients(dy, saved,",
        ),
        "bias gradient of h": ("_gradients", "dz.sum(0)", "hidden.sum(0)"),
        "columns a block short": (
            "_elementwise",
            "triton.cdiv(size.N, tile.columns))",
            "max(1, size.N // tile.columns))",
        ),
        "blocks short": (
            "_First.__init__",
            "triton.cdiv(width, tiles.columns)",
            "max(1, width // tiles.columns)",
        ),
        "hidden gradient not written": (
            "_hidden_backward",
            "_store(HIDDEN + place, ok, h)",
            "_store(HIDDEN + place, ok & (j < size.N - 1)[None, :], h)",
        ),
        "gated gradients swapped": (
            "_gated_backward",
            "_store(DV + gradient, ok, dv)",
            "_store(DV + gradient, ok, dz)",
        ),
        "swiglu on gelu": ("_gated_backward", "f = _activate(z, case.kind)", "f = _activate(z, 1)"),
        "value read at the stride of the gate": (
            "_gated",
            "_load(V + _offsets(i0, i, j, strides.v)",
            "_load(V + _offsets(i0, i, j, strides.z)",
        ),
        "derivative of relu at zero": ("_derivative", "z <= 0.0", "z < 0.0"),
    },
    "rotary": {
        "int32 tokens": ("_place", "(i % size.length).to(tl.int64)", "(i % size.length)"),
        "gradients left uninitialised": ("backward", "out.copy_(parts.sum(0))", "parts.sum(0)"),
        "partial sums of 16 bits": (
            "backward",
            "grad_query.new_empty(n if total else 0, dim, dtype=wide)",
            "grad_query.new_empty(n if total else 0, dim)",
        ),
        "strided tensors read as dense": (
            "forward",
            "[x if x is None else unit_stride(x) for x in given]",
            "list(given)",
        ),
        "no key for an interleaved call": (
            "forward",
            '"rotary", interleaved, eps',
            '"rotary", eps',
        ),
    },
    "embedding": {
        "int32 rows of the table": ("_forward", "other=0).to(tl.int64)", "other=0).to(tl.int32)"),
        "a token past the table": ("_forward", "tl.minimum(tl.maximum(t, 0), size.V - 1)", "t"),
        "scaled twice": ("backward", "1.0 if needs[1] else scale", "scale"),
        "not scaled beside positions": (
            "backward",
            "dweight.mul_(scale) if needs[1] else dweight",
            "dweight",
        ),
        "positions not written": ("backward", "positional.new_zeros", "positional.new_empty"),
        "positions of one sequence": (
            "backward",
            "g.view(-1, length, n).sum(0, dtype=wide)",
            "g.view(-1, length, n)[0]",
        ),
        "features a block short": (
            "_launch",
            "triton.cdiv(size.N, tiles.columns))",
            "max(1, size.N // tiles.columns))",
        ),
        "rows a block short": (
            "_launch",
            "(triton.cdiv(size.M, tiles.rows),",
            "(max(1, size.M // tiles.rows),",
        ),
        "stride of the table for the positions": (
            "forward",
            "(weight if p is None else p).stride(0)",
            "weight.stride(0)",
        ),
        "a strided gradient": ("_scaled_gradient", "dy = as_rows(grad, n)", "dy = grad"),
        "strided positions": ("forward", "unit_stride(positional)", "positional"),
    },
    "cross_entropy": {
        "logits not shifted": ("_add", "part = x - origin", "part = x"),
        "share of no row": ("linear_backward", ".clamp_min_(1)", ""),
        "a block for what is before the first group": (
            "_row",
            "groups, groups + 2)",
            "groups, groups + 1)",
        ),
        "share of every row": ("_part_of_mean", "1.0 / tl.load(COUNT)", "1.0"),
        "int32 rows": ("loss_kernel", "tl.program_id(0).to(tl.int64)", "tl.program_id(0)"),
        "int32 rows of the gradient": (
            "gradient_kernel",
            "tl.program_id(0).to(tl.int64)",
            "tl.program_id(0)",
        ),
        "stale log-sum": (
            "loss_kernel",
            "tl.store(LSE + 2 * i + 1, log_sum)",
            "tl.store(LSE + 2 * i + 1, shift)",
        ),
        "a block at -inf": ("_add", 'tl.where(m_new == float("-inf"), 0.0, m_new)', "m_new"),
        "a target past the classes": ("_known", " & (t >= 0) & (t < labels.V)", ""),
        "mean over the ignored": (
            "_count",
            "(target != ignore_index).sum()",
            "torch.ones_like(target).sum()",
        ),
        "the last chunk": (
            "linear_forward",
            "range(0, len(x), chunk)",
            "range(0, max(1, len(x) - chunk + 1), chunk)",
        ),
        "a chunk of one row": (
            "linear_forward",
            "range(0, len(x), chunk)",
            "range(0, max(1, len(x) - 1), chunk)",
        ),
        "a chunk of one row in the backward": (
            "linear_backward",
            "range(0, len(x), chunk)",
            "range(0, max(1, len(x) - 1), chunk)",
        ),
        "weight gradient of the last chunk": ("_accumulate", "dw += ", "dw[:] = "),
        "bias gradient of the last chunk": ("_accumulate", "db += ", "db[:] = "),
        "weight gradient summed in the input's dtype": (
            "_wide_product",
            "a.to(dtype) @ b.to(dtype)",
            "(a @ b).to(dtype)",
        ),
        "statistics of the first chunk": (
            "linear_backward",
            "lse[part], g[part], logits",
            "lse, g[part], logits",
        ),
        "share taken twice": (
            "linear_forward",
            "lse[part], None, dx)",
            "lse[part], count if reduction == 'mean' else None, dx)",
        ),
        "a gradient of 1 for another": ("gradient_kernel", "g == 1.0", "g != 0.0"),
        "a gradient ahead of a sum": ("_may_write_ahead", 'reduction == "mean" and ', ""),
        "one g for all rows": (
            "Smoothing.gradient",
            "g.stride(0) if g.numel() > 1 else 0",
            "g.stride(0)",
        ),
        "stride of the logits for their gradient": (
            "Smoothing.launch",
            "0 if dx is None else dx.stride(0)",
            "x.stride(0)",
        ),
        "gradients that stand as the logits do": (
            "Smoothing.launch",
            "(strides.x - strides.dx) % group == 0",
            "True",
        ),
        "entropy without its zeros": ("Smoothing.constant", " if p > 0", ""),
        "smoothing over all classes": (
            "Smoothing.labels",
            "self.amount / (self.v - 2)",
            "self.amount / self.v",
        ),
        "classes of kl": ("Smoothing.launch", "self.v - (labels.pad >= 0)", "self.v"),
    },
    "common": {
        "rounds of Philox": (
            "",
            "PHILOX_ROUNDS = tl.constexpr(7)",
            "PHILOX_ROUNDS = tl.constexpr(6)",
        ),
        "counter of the rows": ("dropout_keep", "i0 // 2 + tl.arange", "i0 + tl.arange"),
        "shift of the counters": ("dropout_words", "j ^ stream.shift", "j"),
        "words of the tile": (
            "dropout_words",
            "tl.join(tl.join(w0 << 16, w1 << 16), tl.join(w0, w1))",
            "tl.join(tl.join(w0 << 16, w0), tl.join(w1 << 16, w1))",
        ),
        "one half of a word for two columns": ("dropout_words", "w0 << 16, w1 << 16", "w0, w1"),
        "the same key in all rounds": ("philox", "tl.add(key, PHILOX_STEP", "tl.add(key, 0"),
        "low words alone": ("philox", "high ^ key ^ c1", "high ^ key"),
        "number of a head": (
            "dropout_stream",
            "batch_head.to(tl.uint64) + 1",
            "batch_head.to(tl.uint64)",
        ),
        "bits of the head not mixed": ("dropout_stream", "z ^ (z >> 27)", "z"),
        "dropout inverted": (
            "dropout_keep",
            ">= threshold.to(tl.uint32, bitcast=True)",
            "< threshold.to(tl.uint32, bitcast=True)",
        ),
        "threshold signed": (
            "row_dropout_keep",
            ">= threshold.to(tl.uint32, bitcast=True)",
            ">= threshold",
        ),
        "threshold off by one": (
            "row_dropout_keep",
            ">= threshold.to(tl.uint32, bitcast=True)",
            "> threshold.to(tl.uint32, bitcast=True)",
        ),
        "rows share the counter of attention": ("row_dropout_keep", "low * 0 + 1", "low * 0"),
        "high words of the rows": ("row_dropout_keep", "(rows >> 32)", "(rows >> 31)"),
        "words of a row": (
            "row_dropout_keep",
            "tl.join(tl.join(w0, w2), tl.join(w1, w3))",
            "tl.join(tl.join(w0, w1), tl.join(w2, w3))",
        ),
        "kept at p = 1": ("dropout_arguments", "if p < 1 else 0.0", "if p < 1 else 1.0"),
        "scaled by 1 / p": ("dropout_arguments", "1 / (1 - p)", "1 / p"),
        "threshold of 15 bits": ("dropout_arguments", "round(p * 2**16)", "round(p * 2**15)"),
    },
    "launch": {
        "a last stride of 2": ("unit_stride", "x.stride(-1) == 1 or", "x.stride(-1) < 3 or"),
        "alignment left out of a plan": ("layout", ", x.data_ptr() & 15)", ")"),
        "dtype left out of a plan": ("layout", "x.dtype, ", ""),
        "plans without end": ("remembered", "len(plans) >= MOST_PLANS", "False"),
    },
    "tuned": {
        "measurements that no call takes": ("choose", "if label(option) == chosen", "if False"),
        "an unknown choice that is the last option": (
            "choose",
            "    _ignore(chosen, kernel)\n    return shipped\n",
            "    _ignore(chosen, kernel)\n    return option\n",
        ),
        "sizes as they are": ("named", "next_power_of_2(n)", "n"),
        "plans of another choice": (
            "forced",
            "_asked, _forced = before\n        plans.clear()\n",
            "_asked, _forced = before\n",
        ),
    },
}

# Of shards: tests/ops/test_shard.py plants them.
SHARDED = {
    "queries of a shard not moved": (
        "moved",
        "sizes.shard.query - sizes.shard.key",
        "0 - sizes.shard.key",
    ),
    "keys of a shard not moved": (
        "moved",
        "sizes.shard.query - sizes.shard.key",
        "sizes.shard.query",
    ),
    "the band of a shard not moved": (
        "locate_sequence",
        "shift += moved(sizes, has)",
        "shift += 0",
    ),
    "a shard aligned at its own end": (
        "locate_sequence",
        "shift += queries - shard.queries",
        "shift += 0",
    ),
    "lengths of the shard": ("locate_sequence", "length - shard.key, 0,", "length, 0,"),
    "lengths cut to the shard": ("locate_sequence", "length = shard.keys", "length = length"),
    "first sequence of the shard": (
        "locate_head",
        "(shard.batch + b)",
        "(b)",
    ),
    "first head of the shard": ("locate_head", "shard.head + h", "h"),
    "heads of the shard": ("locate_head", "* shard.heads +", "* call.sizes.heads +"),
    "dropout of the first queries": ("kept", "i0 += shard.query", "i0 += 0"),
    "dropout of the first keys": ("kept", "n0 += shard.key", "n0 += 0"),
    "the band of a bias gradient not moved": (
        "_members_of_tile",
        "shift = moved(sizes, has)",
        "shift = 0",
    ),
}
MORE["attention"] |= SHARDED
SHARDED_ROWS = {
    "rows of a shard not moved": ("global_rows", "first + i //", "i //"),
    "runs of a shard not moved": ("global_rows", "i // run * sequence", "i // run * run"),
    "columns of a shard's rows not moved": ("drop_rows", "o += shard.column", "o += 0"),
    "columns of a shard's tile not moved": ("dropout_keep", "j0 += shard.column", "j0 += 0"),
}
MORE["common"] |= SHARDED_ROWS

# Mutants that compute the same, and why.
EQUIVALENT = {
    ("attention", "an unbounded window"): "a side that is unbounded is no argument of the kernels",
    ("common", "threshold signed"): "Triton compares uint32 with int32 as unsigned",
}

# Tests that see a kernel file, after the quick check beside it.
COVERED_BY = {
    "attention": (
        "ops/test_bounds.py",
        "ops/test_launch_order.py",
        "ops/test_hopper.py",
        "ops/test_hopper_backward.py",
        "ops/test_decode_attention.py",
        "ops/test_shard.py",
        "ops/test_attention.py",
        "ops/test_padding.py",
        "ops/test_sizes.py",
    ),
    "layer_norm": (
        "ops/test_layer_norm.py",
        "ops/test_nan.py",
        "ops/test_sizes.py",
        "dispatch/test_plans.py",
    ),
    "feed_forward": (
        "ops/test_feed_forward.py",
        "ops/test_nan.py",
        "ops/test_sizes.py",
        "dispatch/test_plans.py",
    ),
    "rotary": (
        "ops/test_rotary.py",
        "ops/test_sizes.py",
        "dispatch/test_plans.py",
        "dispatch/test_load.py",
        "dispatch/test_autograd.py",
        "nn/test_rotary_model.py",
    ),
    "embedding": (
        "ops/test_embedding.py",
        "ops/test_nan.py",
        "ops/test_sizes.py",
        "dispatch/test_plans.py",
    ),
    "cross_entropy": (
        "ops/test_cross_entropy.py",
        "ops/test_nan.py",
        "ops/test_sizes.py",
        "dispatch/test_plans.py",
    ),
    "common": (
        "ops/test_dropout.py",
        "ops/test_shard.py",
        "ops/test_embedding.py",
        "ops/test_layer_norm.py",
        "ops/test_attention.py",
    ),
    "launch": (
        "dispatch/test_plans.py",
        "dispatch/test_load.py",
        "ops/test_layer_norm.py",
        "ops/test_attention.py",
        "dispatch/test_backends.py",
    ),
    "registration": ("dispatch/test_load.py", "dispatch/test_autograd.py"),
    "tuned": ("tuning/test_tuning.py", "tuning/test_safety.py"),
    "autograd": ("dispatch/test_autograd.py",),
    "backends": ("dispatch/test_backends.py", "dispatch/test_autograd.py", "tuning/test_tuning.py"),
    "padding": ("ops/test_padding.py",),
}

# ----------------------------------------------------------------------------- mutants by operators

DRAWN_FROM = {
    "kernels": (
        "kernels/attention/backward.py",
        "kernels/attention/bounds.py",
        "kernels/attention/configurations.py",
        "kernels/attention/decode.py",
        "kernels/attention/forward.py",
        "kernels/attention/hopper.py",
        "kernels/attention/hopper_backward.py",
        "kernels/attention/hopper_dkdv.py",
        "kernels/attention/hopper_dq.py",
        "kernels/attention/hopper_parts.py",
        "kernels/attention/hopper_rows.py",
        "kernels/attention/hopper_work.py",
        "kernels/attention/launchers.py",
        "kernels/attention/plan.py",
        "kernels/attention/scores.py",
        "kernels/common.py",
        "kernels/cross_entropy/kernels.py",
        "kernels/cross_entropy/launchers.py",
        "kernels/embedding.py",
        "kernels/feed_forward.py",
        "kernels/launch.py",
        "kernels/layer_norm/kernels.py",
        "kernels/layer_norm/launchers.py",
        "kernels/registration.py",
        "kernels/rotary.py",
        "kernels/tuned.py",
        "fastformer/dispatch/autograd.py",
        "fastformer/dispatch/backends.py",
        "fastformer/nn/padding.py",
    ),
    "api": (
        "fastformer/cache/contiguous.py",
        "fastformer/cache/decoder.py",
        "fastformer/cache/memory.py",
        "fastformer/cache/paged.py",
        "fastformer/cache/rows.py",
        "fastformer/decoding/search.py",
        "fastformer/decoding/steps.py",
        "fastformer/dispatch/measurements.py",
        "fastformer/dispatch/sharding/call.py",
        "fastformer/dispatch/sharding/local.py",
        "fastformer/dispatch/sharding/losses.py",
        "fastformer/dispatch/sharding/placements.py",
        "fastformer/dispatch/sharding/projections.py",
        "fastformer/distributed/context_parallel.py",
        "fastformer/distributed/styles.py",
        "fastformer/drop_in/hugging_face.py",
        "fastformer/drop_in/masks.py",
        "fastformer/drop_in/replacements/annotated.py",
        "fastformer/drop_in/replacements/attention.py",
        "fastformer/drop_in/replacements/base.py",
        "fastformer/drop_in/replacements/layers.py",
        "fastformer/drop_in/replacements/norms.py",
        "fastformer/drop_in/replacements/stacks.py",
        "fastformer/nn/attention.py",
        "fastformer/nn/base.py",
        "fastformer/nn/embeddings.py",
        "fastformer/nn/feed_forward.py",
        "fastformer/nn/norms.py",
        "fastformer/nn/stacks.py",
        "fastformer/nn/stream.py",
        "fastformer/nn/transformer.py",
        "fastformer/ops/attention/contract.py",
        "fastformer/ops/embedding/contract.py",
        "fastformer/ops/feed_forward/contract.py",
        "fastformer/ops/loss/contract.py",
        "fastformer/ops/norms/contract.py",
        "fastformer/ops/attention/arguments.py",
        "fastformer/ops/row_shards.py",
    ),
    "models": (
        "kernels/feed_forward.py",
        "kernels/rotary.py",
        "fastformer/drop_in/replacements/hugging_face.py",
        "fastformer/drop_in/replacements/rotary.py",
        "fastformer/drop_in/trial.py",
        "fastformer/nn/embeddings.py",
        "fastformer/nn/padding.py",
        "fastformer/nn/saving.py",
        "fastformer/nn/stacks.py",
        "fastformer/ops/feed_forward/contract.py",
        "fastformer/ops/feed_forward/record.py",
        "fastformer/ops/feed_forward/reference.py",
        "fastformer/ops/rotary/contract.py",
        "fastformer/ops/rotary/frequencies.py",
        "fastformer/ops/rotary/record.py",
        "fastformer/ops/rotary/reference.py",
        "fastformer/training/batches.py",
    ),
}
# By draw and file: the functions and classes that mutants are drawn from, where they are not all.
DRAWN_WITHIN = {
    "models": {
        "kernels/feed_forward.py": (
            "_gated", "_gated_backward", "_elementwise", "_fake_activation", "_read_in_place",
            "activation_forward", "activation_backward", "supports",
        ),
        "fastformer/nn/embeddings.py": ("_rows", "RotaryEmbedding"),
        "fastformer/nn/stacks.py": (
            "_Stack._run", "Encoder", "Decoder", "require_packings", "EncoderLayer.forward",
            "EncoderLayer._through", "DecoderLayer.forward", "DecoderLayer._through",
        ),
        "fastformer/ops/feed_forward/contract.py": ("gated_activation",),
        "fastformer/ops/feed_forward/record.py": (
            "_gate_dims", "_describe_gate", "_gate_arguments",
        ),
        "fastformer/ops/feed_forward/reference.py": ("gated_activation",),
    },
}  # fmt: skip

# By draw: the tests whose lines `python -m benchmarks.proof.mutation --draw N --of NAME` records.
EXECUTED_BY = {
    "api": (
        "ops/test_wrong_calls.py",
        "nn/test_modules.py",
        "nn/test_transformer.py",
        "decoding/test_cache.py",
        "decoding/test_decoding.py",
        "nn/test_language_model.py",
        "drop_in/test_patch.py",
        "drop_in/test_integrations.py",
        "tuning/test_tuning.py",
        "ops/test_attention.py",
        "ops/test_decode_attention.py",
        "ops/test_padding.py",
        "ops/test_layer_norm.py",
        "ops/test_cross_entropy.py",
        "ops/test_feed_forward.py",
        "ops/test_embedding.py",
        "ops/test_dropout.py",
        "ops/test_shard.py",
        "dispatch/test_autograd.py",
        "dispatch/test_backends.py",
        "ops/test_nan.py",
        "drop_in/test_torch_databases.py",
        "nn/test_whole_model.py",
        "training/test_copy_task.py",
        "training/test_training.py",
        "distributed/test_context_parallel.py",
        "distributed/test_parallel.py",
    ),
    "models": (
        "ops/test_rotary.py",
        "ops/test_feed_forward.py",
        "ops/test_padding.py",
        "ops/test_wrong_calls.py",
        "ops/test_sizes.py::test_rotary",
        "ops/test_sizes.py::test_gated_activation",
        "ops/test_sizes.py::test_programs_past_int32",
        "ops/test_shard.py::test_shards_of_rows[swiglu]",
        *(
            f"ops/test_fuzz.py::{test}{op}]"
            for test in ("test_fuzz[reference-", "test_fuzz[triton-", "test_fakes[")
            for op in ("rotary_embedding", "gated_activation", "swiglu")
        ),
        *(
            f"dispatch/test_autograd.py::{test}{op}]"
            for test in ("test_gradcheck[triton-", "test_double_backward[")
            for op in ("rotary_embedding", "rotary_embedding without norms", "gated_activation")
        ),
        "dispatch/test_plans.py",
        "tuning/test_tuner.py::test_a_case_makes_a_call_of_its_own_kind",
        "tuning/test_tuning.py::test_every_measured_row_of_tiles_reaches_its_launch"
        "[rotary_embedding]",
        "nn/test_rotary_model.py",
        "nn/test_modules.py",
        "nn/test_transformer.py",
        "nn/test_saving.py",
        "drop_in/test_whole_hugging_face_models.py",
        "drop_in/test_hugging_face_losses.py",
        *(
            f"drop_in/test_patch.py::{test}"
            for test in (
                "test_near_misses_are_skipped",
                "test_other_parts_are_another_class",
                "test_a_trial_run_under_a_default_device",
                "test_a_trial_run_leaves_no_trace",
            )
        ),
        "training/test_packed_training.py",
        "training/test_training.py",
        "distributed/test_parallel.py::test_ops_as_dtensors",
    ),
}

# Functions that `python -m benchmarks.proof.mutation --draw` leaves alone, because what they decide
# is no result: it is the time that a GPU takes, or what a GPU is called.
_TILES = "the tiles alone: benchmarks/proof/compile_gate.py compiles those that are shipped"
NOT_DRAWN = {
    "kernels/attention/configurations.py": {"configuration": _TILES, "rows": _TILES},
    "kernels/attention/plan.py": {"Plan.tiles": _TILES, "Plan.case": _TILES},
    "kernels/cross_entropy/launchers.py": {
        "configuration": _TILES,
        "blocks": _TILES,
        "group_size": _TILES,
    },
    "kernels/embedding.py": {"configuration": _TILES},
    "kernels/rotary.py": {"configuration": _TILES, "heads_of_a_program": _TILES},
    "kernels/feed_forward.py": {"configuration": _TILES, "ways": _TILES},
    "kernels/layer_norm/launchers.py": {"configuration": _TILES, "others": _TILES},
    "kernels/registration.py": {
        "_spare_cache": "a folder for compiled kernels, which the interpreter has none of",
    },
    "kernels/launch.py": {
        "architecture": "reads a GPU",
        "dot_precision": "the interpreter has one: the compile gate checks the others",
    },
}

# Drawn mutants that compute the same, and why: those of benchmarks/results/mutation_draw*.json.
DRAWN_EQUIVALENT = {
    ("attention", "launchers 302:33 `0` -> `(-1)`"): "a default that calls without pages ignore",
    (
        "attention",
        "launchers 322:24 `max(2, next_power_of_2(cut.parts))` -> `(next_power_of_2(cut.parts))`",
    ): "a single part, in a block of one or of two",
    ("attention", "launchers 546:28 `15` -> `14`"): "no element has an odd address",
    ("attention", "backward 193:19 `n0 < sequence.length` -> `n0 <= sequence.length`"): "one tile "
    "of keys more, all past the length: it is masked, and costs time",
    ("attention", "backward 550:42 `n0 < hi` -> `n0 <= hi`"): "likewise",
    ("attention", "scores 143:18 `False` -> `True`"): "a default that no launch takes",
    ("attention", "scores 299:23 `* 0).to(tl.int64)` -> `* 0)`"): "the index of a sequence has 64 "
    "bits in every kernel",
    ("attention", "scores 300:21 `* 0).to(tl.int64)` -> `* 0)`"): "likewise",
    ("attention", "scores 454:69 `1` -> `2`"): "Triton broadcasts a row, and a number, by itself",
    ("attention", "scores 492:16 `has.mask > 0` -> `has.mask >= 0`"): "a mask of whole tiles, in "
    "which every key is visible: it costs time",
    ("backends", "166:22 `0` -> `(-1)`"): "an op runs once",
    ("cross_entropy", "163:35 `0` -> `(-1)`"): "a row of one block reads no number of groups",
    (
        "cross_entropy",
        "231:13 `tl.load(row.x + classes).to(case.acc)` -> `(tl.load(row.x + classes))`",
    ): "the difference from the shift promotes it",
    (
        "cross_entropy",
        "239:9 `* target.g).to(dx.dtype.element_ty)` -> `* target.g)`",
    ): "a store converts to what it points to",
    ("cross_entropy", "365:55 `1` -> `2`"): "no class is -2 either",
    ("cross_entropy", "602:72 `0` -> `1`"): "nobody reads an unwanted sum",
    (
        "cross_entropy",
        "720:13 `grad_loss.reshape(-1).contiguous()` -> `(grad_loss.reshape(-1))`",
    ): "the kernel reads any stride",
    (
        "feed_forward",
        "613:13 `saved.reshape(rows, 2 * width).contiguous()` -> "
        "`(saved.reshape(rows, 2 * width))`",
    ): "the forward has saved it contiguous",
    (
        "launch",
        "258:8 `INTERPRETED or not x.is_cuda or x.get_device() == torch.cuda.current_device()` -> "
        "`((INTERPRETED) or (not x.is_cuda))`",
    ): "the device that is current is set again: it costs time",
    ("launch", "276:73 `0` -> `(-1)`"): "no GPU has a minor version below 0",
    ("cache", "176:37 `length.to(torch.int32)` -> `(length)`"): "torch.minimum converts to what it "
    "writes to",
    ("cache", "492:16 `max(1, -(-self.longest //` -> `(-(-self.longest //`"): "of a table without "
    "pages attention and contents are those of no keys, too",
    ("context_parallel", "380:28 `k.whole + k.length - 1` -> `(k.whole + k.length)`"): "one block "
    "more, all of whose keys the window hides: it costs time",
    (
        "context_parallel",
        "422:58 `0.0` -> `1.0`",
    ): "where the sum is -inf each part of it is, whose weight exp(-inf - 1) is 0 as well",
    (
        "drop_in/replacements/hugging_face",
        "120:18 `2e-6` -> `2.1e-06`",
    ): "far above the rounding of the trial runs in float64, and far below another formula",
    (
        "drop_in/replacements/hugging_face",
        "47:18 `unsupported_tensor(x, weight)` -> `unsupported_tensor(weight, x)`",
    ): "where no kernel reads either of them, the report names the other one",
    ("drop_in/replacements/hugging_face", "160:84 `8` -> `9`"): "both forwards of a trial run call "
    "the same last layer, of any width",
    (
        "drop_in/trial",
        "50:28 `torch.allclose(theirs, ours, rtol=kind._tolerance,` -> "
        "`torch.allclose(ours, theirs, rtol=kind._tolerance,`",
    ): "the two bounds differ by the square of the tolerance",
    ("functional", "827:23 `4` -> `5`"): "a shard of everything computes what no shard does",
    ("nn/saving", "202:41 `1` -> `2`"): "another indent in a file of JSON",
    ("replacements", "attention 35:24 `True` -> `False`"): "`accelerate` sets it on each module",
    (
        "replacements",
        "annotated 59:12 `mask is not None and mask.is_floating_point()` -> `((mask is not None))`",
    ): "the attention compares booleans and integers with 0 by itself",
    ("replacements", "base 42:40 `1` -> `2`"): "the first word of a message is the same",
    ("replacements", "layers 43:9 `raise NotImplementedError` -> `pass`"): "each layer and each "
    "stack has the method",
    ("rotary", "519:46 `0` -> `1`"): "without tokens the grid is empty; no key has one element",
    ("rotary", "563:30 `0` -> `1`"): "without tokens the grid is empty, and the sum of no partial "
    "sums is zero; no query has one element",
    ("sharding", "568:38 `1` -> `0`"): "sequences without rows give chunks without rows",
    ("transformer", "601:72 `0` -> `1`"): "all sublayers of a layer are copies of one",
    ("tuning", "257:48 `1` -> `2`"): "another indent in a file of JSON",
}

# Tests that see most of what an operator changes.
SEEN_BY = {
    "int64 dropped": (
        "ops/test_sizes.py",
        "ops/test_attention.py::test_tiles_past_int32",
        *(
            f"ops/test_{kernel}.py::test_offsets_past_int32"
            for kernel in ("attention", "cross_entropy", "embedding", "feed_forward", "layer_norm")
        ),
    ),
    "a field left out of a key": (
        "ops/test_attention.py::test_plans_are_told_apart",
        "ops/test_attention.py::test_every_field_of_a_key",
        "ops/test_attention.py::test_every_field_of_a_key_of_the_backward",
        "dispatch/test_plans.py",
    ),
}

# The ops of tests/ops/test_fuzz.py that run through a kernel file.
FUZZED = {
    "attention": ("scaled_dot_product_attention", "packed_attention", "paged_attention"),
    "layer_norm": (
        "layer_norm",
        "rms_norm",
        "dropout_add_layer_norm",
        "dropout_add_rms_norm",
    ),
    "feed_forward": ("feed_forward", "geglu", "swiglu", "gated_activation"),
    "embedding": ("embed",),
    "rotary": ("rotary_embedding",),
    "cross_entropy": ("cross_entropy", "linear_cross_entropy"),
    "common": ("embed", "dropout_add_layer_norm", "feed_forward", "scaled_dot_product_attention"),
    "launch": ("scaled_dot_product_attention", "layer_norm"),
    "registration": ("embed",),
    "tuned": (),
    "autograd": (),
    "backends": (),
    "padding": (),
}

# Tests that are recorded as the first to see a mutant, and that only `pytest --all` runs.
SEEN_WITH_ALL = {
    "tests/ops/test_attention.py::test_a_large_bias_of_all_keys[reference-torch.bfloat16-alibi-output]",
    "tests/decoding/test_cache.py::test_a_failed_append_leaves_the_cache_as_it_was"
    "[new11-TypeError-key is a NoneType-False]",
    "tests/decoding/test_decoding.py::test_few_beams_are_the_search_written_out[3-0.0]",
    "tests/distributed/test_context_parallel.py::test_models_are_the_whole[4]",
    "tests/distributed/test_parallel.py::test_death_and_resumption",
    "tests/distributed/test_parallel.py::test_models",
    "tests/distributed/test_parallel.py::test_ops_as_dtensors",
    "tests/distributed/test_parallel.py::test_torchrun[tensor]",
    "tests/drop_in/test_patch.py::test_transformer_with_padding[reference-both paddings]",
    "tests/ops/test_bounds.py::test_tiles_that_are_visited",
    "tests/ops/test_wrong_calls.py::test_ops[reference-attention_weights]",
}
