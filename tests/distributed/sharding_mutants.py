"""Rules of sharding that are broken by hand, each with a check of parallel_checks.py that has to
fail: (check, the text of the rule, the broken text). The text stands in one of SOURCES.
"""

from benchmarks import ROOT

FOLDER = ROOT / "fastformer"
SOURCES = [
    *sorted((FOLDER / "dispatch" / "sharding").glob("[a-z]*.py")),
    FOLDER / "description.py",
    FOLDER / "distributed" / "styles.py",
    *sorted((FOLDER / "ops").glob("*/contract.py")),
    FOLDER / "ops" / "attention" / "record.py",
]

BROKEN = [
    # ---- which dimensions are sharded
    ("attention", '"key_lengths", "Tensor?", "b")', '"key_lengths", "Tensor?", ".")'),
    ("attention", '"sinks", "Tensor?", "h"', '"sinks", "Tensor?", "."'),
    ("attention", '"alibi_slopes", "Tensor?", "bh"', '"alibi_slopes", "Tensor?", ".h"'),
    ("attention", '"." if size == 1 else dim for', '"." if dim == "b" else dim for'),
    ("attention", '_output_dims, "hbq")', '_output_dims, "bhq")'),
    ("attention", '_output_dims, "hbq")', '_output_dims, "hb")'),
    ("other_attention", '"block_table": "b."', '"block_table": ".."'),
    ("other_attention", '{"query": ".hd", "key": ".hd"', '{"query": "bhd", "key": ".hd"'),
    ("feed_forward", 'ROW_DIMS, {"f": ("input",)}', "ROW_DIMS, {}"),
    ("feed_forward", '"f" + operation.ROW_DIMS,', 'operation.ROW_DIMS + "f",'),
    ("embedding", '{"v": ("tokens",), "n": ("tokens",)}', '{"n": ("tokens",)}'),
    ("rotary", '("bhq.", "bq.")', '("bhq.", "b..")'),
    ("rotary", "return n * math.prod(sizes)", "return call.sizes[dim]"),
    ("losses", 'gathers={"v": ("input", "target")}', 'gathers={"v": ("input",)}'),
    (
        "packed_batches",
        "by_tokens = x.dim() > 2 and x.shape[0] % device_mesh.size()",
        "by_tokens = x.shape[0] % device_mesh.size()",
    ),
    # ---- the offsets and the global sizes of a shard
    ("masks", "offsets.setdefault(dim, start)", "offsets[dim] = start"),
    ("feed_forward", "and name not in rule.halves", ""),
    ("attention", "sizes[dim] = max(size, sizes.get(dim, 0))", "sizes[dim] = size"),
    (
        "feed_forward",
        "Partial() if dim and placement == Replicate() else placement",
        "placement",
    ),
    (
        "attention",
        "Partial() if dim and placement == Replicate() else placement",
        "Partial() if placement == Replicate() else placement",
    ),
    ("attention", "if not x.requires_grad and not any(", "if not any("),
    ("norms", "and not any(size % mesh.size(i) for size in sizes)", ""),
    ("feed_forward", "_shards_of_halves(local[name], mesh, sharded_dims)", "local[name]"),
    ("norms", "return call.sizes[dim]", "return n * 4"),
    ("attention", "key=lambda i: (-x.stride()[i], i)", "key=lambda i: (x.stride()[i], i)"),
    (
        "torch_transformer",
        "order = sorted(held, key=lambda c: (c % size, c))",
        "order = list(held)",
    ),
    ("feed_forward", "return _Exchange.apply(grad, group, parts, not back)", "return grad"),
    # ---- the output
    ("embedding", 'elif dim == "v" and call.op != "embed":', 'elif dim == "v":'),
    ("losses", "[Partial() if isinstance(p, Shard) else p for p in placements]", "[*placements]"),
    ("feed_forward", 'own["b_2"] * float(is_first)', 'own["b_2"]'),
    ("feed_forward", "is_first = all(dist.get_rank", "is_first = any(dist.get_rank"),
    # ---- the dropout of a shard
    ("masks", 'AttentionShard(batch, offsets.get("h", 0)', "AttentionShard(batch, 0"),
    ("masks", 'offsets.get("q", 0), 0, *full)', "0, 0, *full)"),
    ("masks", 'offsets.get("b", 0) + first', "first"),
    ("masks", 'offsets.get("b", 0) + first', 'offsets.get("b", 0)'),
    ("masks", 'full = sizes["h"], sizes.get("q", 0)', 'full = 0, sizes.get("q", 0)'),
    ("attention", '(attention.dropout_p > 0 or "q" in offsets)', "attention.dropout_p > 0"),
    ("other_attention", 'AttentionShard(batch, offsets.get("h", 0)', "AttentionShard(batch, 0"),
    ("masks", 'call.offsets.get("f", call.offsets.get("n", 0))', 'call.offsets.get("f", 0)'),
    ("masks", 'call.offsets.get("f", call.offsets.get("n", 0))', 'call.offsets.get("n", 0)'),
    ("masks", "begins[:1] = [b + first for b in begins[:1]]", "pass"),
    ("masks", "math.prod(sizes[i + 1 :])", "math.prod(x.shape[i + 1 : len(rows)])"),
    ("masks", "RowShard(begin, column, 0, run, sequence)", "RowShard(begin, column)"),
    ("masks", "if not math.prod(x.shape[: len(rows)]):", "if False:"),
    ("masks", "itertools.count(begin, sequence)", "itertools.count(begin, run)"),
    ("masks", "shard._replace(row=shard.row - before)", "shard"),
    ("masks", "before = shard.row % _TILE_ROWS", "before = shard.row % 8"),
    # ---- sequences that are sharded
    ("context_model", "row = first * sequence + chunk.global_start", "row = first * sequence"),
    ("context_model", "row = first * sequence + chunk.global_start", "row = chunk.global_start"),
    # ---- the embedding
    ("embedding", 'own["positional"][call.offsets[last] :]', 'own["positional"]'),
    ("embedding", "inside = (tokens >= 0) & (tokens < here)", "inside = tokens < here"),
    ("embedding", "padding if 0 <= padding < here else None", 'own["padding_idx"]'),
    ("embedding", ".masked_fill(~inside.unsqueeze(-1), 0.0)", ""),
    # ---- the losses
    ("losses", "for dim in dict.fromkeys(call.sharded_dims):", "for dim in call.sharded_dims:"),
    ("losses", 'if dim and dim != "v" else ()', 'if dim == "0" else ()'),
    ("losses", 'own["target"] != own["ignore_index"]).sum()', 'own["target"] >= 0).sum()'),
    ("losses", 'shard = call.offsets["v"], call.sizes["v"]', 'shard = 0, call.sizes["v"]'),
    ("losses", "dist.all_reduce(top, dist.ReduceOp.MAX, group)", "pass"),
    ("losses", "            dist.all_reduce(dot, group=group)\n", ""),
    ("losses", "            dist.all_reduce(lse, group=group)\n", ""),
    ("losses", "+ smoothed.constant())", ")"),
    ("losses", ".masked_fill_(flat == labels[0], 0.0)", ""),
    ("losses", "inside = (at >= 0) & (at < here)", "inside = at < here"),
    ("losses", 'if self.smoothing == "kl" and 0 <= at < here', "if 0 <= at < here"),
    ("losses", "d[:, padding] += off", "pass"),
    ("losses", "total = total - off * logits[:, padding]", "pass"),
    ("losses", "db += d.sum(0)", "db += d[0]"),
    # ---- the styles
    ("torch_transformer", "to_local(grad_placements=[Partial()])", "to_local()"),
    ("torch_transformer", "rows = list(rows[0].chunk(3))", "rows = list(rows[0].chunk(3))[::-1]"),
    ("torch_transformer", "if parts > 1 else local", "if False else local"),
    ("tensor_parallel", "if id(old) not in self._made:", "if True:"),
    # ---- what is refused
    ("refusals", "if sharded and want == Replicate() and", "if False and"),
    ("refusals", 'if dim == "h" and want != Replicate() and', "if False and"),
    ("refusals", "if mesh is not None and type(x) is torch.nn.Parameter:", "if False:"),
    ("refusals", "elif x.device_mesh != mesh:", "elif False:"),
    ("refusals", "if mesh.size(i) > 1 and shard % group:", "if False:"),
    ("refusals", 'require_group(call, "q", _TILE_ROWS', 'require_group(call, "q", 1'),
    ("refusals", "        size //= 2\n", "        pass\n"),
    ("refusals", "            size = shard\n", ""),
    ("refusals", "if any(dim in call.sharded_dims for dim in rows[1:last]):", "if False:"),
    ("refusals", 'x.shape[0] % (2 * mesh.size(sharded_dims.index("f")))', "False"),
    ("refusals", 'if flattened.get("shard") is not None and (', "if False and ("),
    ("refusals", "if first and len(rows) < 2:", "if False:"),
]
