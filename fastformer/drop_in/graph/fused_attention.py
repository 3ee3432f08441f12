"""Emits the fused op of an attention that `attention` has found."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_flatten

from fastformer.checks import draw_seeds, require_dropout
from fastformer.drop_in.graph.attention import Fill, Finder, Form, Read, is_small
from fastformer.drop_in.graph.axes import (
    Arranger,
    Axis,
    Dims,
    Product,
    before_view,
    fitting,
    flat,
    is_permute,
    is_reshape,
    operand_dims,
)
from fastformer.drop_in.graph.nodes import (
    RANDOM,
    Emitter,
    History,
    Stays,
    evaluated,
    is_cast,
    is_written,
    name,
    same,
    source,
    tensor,
    written,
)
from fastformer.ops.dropout import dropout_scale
from fastformer.ops.functional import scaled_dot_product_attention

_HIDES = -1e3  # a fill above it leaves weights that are not 0
_MOST = 1 << 24  # elements of a mask that is looked at
_CAUSAL = -1e8  # a term that hides later keys adds at most this to their scores
_LEAST = -1e30  # terms below it are made smaller; the op hides a key by terms below -2e38


class Layout:
    """Which axes are the batch, the queries, the keys and the features of an attention.

    lead, kv_lead: the axes of each dimension before [sequence, features], of queries and of keys
    and values. Heads that share keys and values are the last of them, with enable_gqa.
    """

    def __init__(self, history: History, form: Form, weights: Dims, values: Read) -> None:
        with_keys = [read for read in form.operands if _axes(read) & {*flat(form.keys)}]
        if len(with_keys) != 1 or not {*flat(form.keys)} <= _axes(with_keys[0]):
            raise Stays("its softmax is over more than the keys")
        self.q = next(read for read in form.operands if read is not with_keys[0])
        self.k = _unrepeated(history, with_keys[0], {*flat(form.features), *flat(form.keys)})
        of_weights = {axis for dim in weights for axis in flat(dim)}
        self.v = _unrepeated(history, values, _axes(values) - of_weights | {*flat(form.keys)})
        self.keys, self.features = flat(form.keys), flat(form.features)
        order = [axis for dim in weights for axis in flat(dim)]
        self.queries = self._queries(order)
        batch = [axis for axis in order if axis not in self.queries + self.keys]
        self.values = [x for dim in values.dims for x in flat(dim) if x not in order]
        for axis in batch:
            if axis in _axes(self.k) and axis not in _axes(self.q) | _axes(self.v):
                raise Stays("its scores are mixed after the product of queries and keys")
        shared: list[Axis] = []
        while batch and batch[-1] in _axes(self.q) - _axes(self.k) - _axes(self.v):
            shared.insert(0, batch.pop())
        self.kv_lead: Dims = [[axis] for axis in batch] or [[]]
        self.lead = self.kv_lead
        if len(batch) > 1 and shared:
            self.lead = [*self.kv_lead[:-1], [*self.kv_lead[-1], *shared]]
        elif shared:
            self.lead, self.kv_lead = [*self.kv_lead, shared], [*self.kv_lead, []]
        sink = form.sink
        self.sink = sink if sink is None else _unrepeated(history, sink, {*self.lead[-1]})

    def _queries(self, order: list[Axis]) -> list[Axis]:
        others = _axes(self.k) | _axes(self.v)
        dims = [[axis for axis in flat(dim) if axis in order] for dim in self.q.dims]
        own = [dim for dim in dims if dim and not others & {*dim}]
        return max(own, key=lambda dim: order.index(dim[-1])) if own else []


def _unrepeated(history: History, read: Read, kept: set[Axis]) -> Read:
    """Return the tensor of which one is a repetition, if that has these axes."""
    node, dims, result = read.node, read.dims, read
    while not is_written(node) and (below := before_view(node, dims)) is not None:
        reader, node, dims = node, source(node), below
        if not history.is_one_region([node, reader, read.reader]):
            break
        lost = _axes(result) - _axes(found := Read(node, dims, reader))
        if lost and not lost & {x for axis in kept for x in flat([axis])}:
            result = found
    return result


def _axes(read: Read) -> set[Axis]:
    return {axis for dim in read.dims for axis in flat(dim)}


def fused_attention(history: History, node: fx.Node, found: Product) -> tuple[fx.Node, Form] | None:
    """Return the fused op in place of a product of weights and values, and what it stands for; None
    if the product is no such one.
    """
    for side in (0, 1):
        known: dict[Any, list[Axis]] = {}
        dims = operand_dims(found, known)
        operands = found.left, found.right
        form = Finder(history).find(operands[side], dims[side], node)
        if form is None:
            continue
        labels = {*found.labels[0]} - {*found.labels[2]}
        if {x for label in labels for x in flat(known[label])} != {*flat(form.keys)}:
            raise Stays("its values are summed over other dimensions than those of the softmax")
        if found.term is not None and found.plus:
            raise Stays("its values are added to a term")
        form.out_scale *= found.factor
        layout = Layout(history, form, dims[side], Read(operands[1 - side], dims[1 - side], node))
        fuser = Fuser(history, node, form, layout)
        out = fuser.fuse()
        groups = [known[label] for label in found.labels[2]]
        out = fuser.views.arrange(out, [*layout.lead, layout.queries, layout.values], groups)
        if tensor(out).dtype != tensor(node).dtype:
            raise Stays(f"its result would be {tensor(out).dtype}")
        out = fitting(fuser.emit, out, node)
        leaving = {*history.last().all_input_nodes}
        if any(x in leaving for x in history.aliases(node)):
            out = fuser.emit("clone", out)  # the backward reads the op's own
        if form.dropout is not None and fuser.readers:
            readers = {*fuser.readers}
            form.dropout.reader.replace_all_uses_with(fuser.kept, readers.__contains__)
        return out, form
    return None


class Fuser:
    """Replaces the product of weights and values, `anchor`, by the fused op."""

    def __init__(self, history: History, anchor: fx.Node, form: Form, layout: Layout) -> None:
        self.history, self.anchor, self.form, self.layout = history, anchor, form, layout
        self.emit = Emitter(history, anchor)
        self.views = Arranger(self.emit)

    def fuse(self) -> fx.Node:
        """Emit the op; return its output, with the axes [batch.., queries, values]."""
        form, layout = self.form, self.layout
        self._check()
        leads = layout.lead, layout.kv_lead, layout.kv_lead
        queries, keys = (layout.queries, layout.features), (layout.keys, layout.features)
        lasts = queries, keys, (layout.keys, layout.values)
        q, k, v = (
            self.views.arrange(read.node, read.dims, [*lead, *last])
            for read, lead, last in zip((layout.q, layout.k, layout.v), leads, lasts)
        )
        q, k, v = self._one_dtype(q, k, v)
        for read, divides in form.tensor_scales:
            q = self._scaled(q, read, divides)
        self.causal: dict[str, Any] = {}
        bias = self._bias(q)
        mask, empty = self._mask()
        q, k, v = (
            self.views.expanded(x, [*lead, *last]) for x, lead, last in zip((q, k, v), leads, lasts)
        )
        if empty is not None:  # weights of 1 / Sk
            q = self.emit("masked_fill", q, empty, 0.0)
            bias = None if bias is None else self.emit(torch.masked_fill, bias, empty, 0.0)
        options: dict[str, Any] = dict(attn_mask=mask, bias=bias, dropout_p=form.dropout_p)
        options = {key: x for key, x in options.items() if x is not None and x != 0.0} | self.causal
        self.readers = self._readers_of_dropped()
        if self.readers:
            options["dropout_seed"] = self.emit(draw_seeds, 1, tensor(q).device)
            self.kept = self._dropped_as_by_op(options["dropout_seed"])
        if layout.sink is not None:
            options["sinks"] = self._sinks(layout.sink, tensor(q).dtype)
        if form.capped:
            options["softcap"] = form.amplitude
            form.scale *= form.amplitude
        if layout.lead != layout.kv_lead:
            options["enable_gqa"] = True
        out = self.emit(scaled_dot_product_attention, q, k, v, scale=form.scale, **options)
        return out if form.out_scale == 1.0 else self.emit("mul", out, form.out_scale)

    def _check(self) -> None:
        form, history = self.form, self.history
        if not history.is_one_region([*form.nodes, self.anchor]):
            raise Stays("a region of autocast or no_grad begins or ends within it")
        reads = [self.layout.q, self.layout.k, self.layout.v]
        reads += [fill.mask for fill in (*form.fills, *form.zeros)]
        reads += [read for read, _ in (*form.tensor_scales, *form.terms)]
        reads += [self.layout.sink] if self.layout.sink is not None else []
        for read in reads:
            before = history.writers(read.node, read.reader, self.anchor)
            if before or history.written_from(read.node, read.reader):
                raise Stays("one of the tensors that it reads is changed in place later")
        if history.written_from(self.anchor, self.anchor):
            raise Stays("its result is changed in place")
        if form.dropout_p >= 1.0 or (form.capped and not form.amplitude > 0.0):
            raise Stays("all its weights are dropped, or its softcap is negative")

    def _one_dtype(self, q: fx.Node, k: fx.Node, v: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
        """Return query, key and value, without a cast to float32 before the scores: the op computes
        them in float32.
        """
        layout = self.layout
        scores, dtype = tensor(layout.q.reader).dtype, tensor(self.anchor).dtype
        if scores == dtype:
            return q, k, v
        widened = torch.promote_types(scores, dtype) == scores
        if not (widened and _was(layout.q.node, dtype) and _was(layout.k.node, dtype)):
            raise Stays("its two products have different dtypes")
        return self.emit("to", q, dtype), self.emit("to", k, dtype), v

    def _scaled(self, q: fx.Node, read: Read, divides: bool) -> fx.Node:
        if _axes(read) & {*self.layout.keys}:
            raise Stays("its scores are multiplied by a tensor of the keys")
        scaled = self.emit(torch.div if divides else torch.mul, q, self._merged(self._fine(read)))
        dtype = tensor(q).dtype
        return scaled if tensor(scaled).dtype == dtype else self.emit("to", scaled, dtype)

    def _sinks(self, read: Read, dtype: torch.dtype) -> fx.Node:
        """Return a number for each head."""
        lead = self.layout.lead
        if len(lead) < 2 or not _axes(read) <= {*lead[-1]}:
            raise Stays("its sinks are no numbers of heads")
        node = self.views.expanded(self.views.arrange(read.node, read.dims, lead[-1:]), lead[-1:])
        return node if tensor(node).dtype in (torch.float32, dtype) else self.emit("float", node)

    def _readers_of_dropped(self) -> list[fx.Node]:
        """Return the readers of the dropped weights that are no part of the attention."""
        form = self.form
        if form.dropout is None:
            return []
        after = form.nodes[: form.nodes.index(form.dropout.reader) + 1]
        readers = {user for x in after for user in x.users} - {*form.nodes, self.anchor}
        late = all(user > self.anchor for user in readers)
        alone = readers <= form.dropout.reader.users.keys() and not written(form.dropout.reader)
        if readers and not (late and alone):
            raise Stays("its dropped weights are read before the values")
        return [*readers]

    def _dropped_as_by_op(self, seed: fx.Node) -> fx.Node:
        """Emit the weights as the op drops them with this seed."""
        layout, weights = self.layout, self.form.dropout
        p = require_dropout("dropout_p", self.form.dropout_p)
        assert weights is not None
        groups = [*layout.lead, layout.queries, layout.keys]
        sizes = [math.prod(axis.size for axis in group) for group in groups]
        shape = [self.views.size(n) for n in (math.prod(sizes[:-2]), *sizes[-2:])]
        drop = self.emit(torch.ops.fastformer.dropped, seed, *shape, p, 0, 0)
        drop = self.emit("view", drop, *self.views.sizes(sizes))
        drop = self.views.arrange(drop, groups, weights.dims)
        kept = self.emit(torch.masked_fill, weights.node, drop, 0.0)
        return self.emit(torch.mul, kept, dropout_scale(p))

    # Masks and terms have one dimension for each axis, until they are merged.

    def _fine(self, read: Read) -> fx.Node:
        layout = self.layout
        axes = [x for dim in (*layout.lead, layout.queries, layout.keys) for x in dim]
        return self.views.arrange(read.node, read.dims, [[axis] for axis in axes])

    def _merged(self, node: fx.Node) -> fx.Node:
        """Return a tensor with a dimension for each one of the scores."""
        layout, shape = self.layout, [*tensor(node).shape]
        full: list[Any] = []
        merged: list[Any] = []
        for axes in (*layout.lead, layout.queries, layout.keys):
            sizes, shape = shape[: len(axes)], shape[len(axes) :]
            if not all(same(n, 1) for n in sizes):
                sizes = [axis.size for axis in axes]
            full += sizes
            merged.append(math.prod(sizes))
        if len(full) == len(merged):
            return node
        if not all(map(same, full, tensor(node).shape)):
            node = self.emit("expand", node, *map(self.views.size, full))
        return self.emit("reshape", node, *self.views.sizes(merged))

    def _bias(self, q: fx.Node) -> fx.Node | None:
        total: fx.Node | None = None
        for read, factor in self.form.terms:
            node = self._fine(read)
            if self._hides_as_causal(read, factor, node):
                continue
            if tensor(node).dtype not in (torch.float32, tensor(q).dtype):
                node = self.emit("to", node, torch.float32)
            node = node if factor == 1.0 else self.emit(torch.mul, node, factor)
            if not is_small(read.node, -_LEAST):
                node = self._bounded(node)
            total = node if total is None else self.emit(torch.add, total, node)
        if total is not None and tensor(total).dtype not in (torch.float32, tensor(q).dtype):
            total = self.emit("to", total, torch.float32)
        return None if total is None else self._merged(total)

    def _hides_as_causal(self, read: Read, factor: float, node: fx.Node) -> bool:
        """Return whether a term is a causal mask, and all else that is added is none."""
        others = [other for other, _ in self.form.terms if other is not read]
        if self.form.fills or not all(is_small(other.node, -_CAUSAL / 100) for other in others):
            return False
        found = evaluated(self._merged(node), _MOST, self.history.values)
        if found is None or not torch.all((found == 0) | (found * factor <= _CAUSAL)):
            return False
        return self._is_causal(found == 0)

    def _is_causal(self, kept: Tensor | None) -> bool:
        """Return whether a mask is causal, and note the options of the op that take its place."""
        if kept is None:
            return False
        rows, columns = (
            math.prod(x.size for x in axes) for axes in (self.layout.queries, self.layout.keys)
        )
        if kept.shape[-2:] != (rows, columns):
            return False
        whole = torch.ones(rows, columns, dtype=torch.bool)
        for alignment, shift in (("bottom_right", columns - rows), ("top_left", 0)):
            if shift >= 0 and torch.all(kept == whole.tril(shift)):
                self.causal = dict(is_causal=True, causal_alignment=alignment)
        return bool(self.causal)

    def _bounded(self, node: fx.Node) -> fx.Node:
        """Return a term in which -inf alone hides a key. The op hides by finfo.min too, and gives
        zeros to a query whose keys are all hidden; the model compares such numbers.
        """
        if tensor(node).dtype is torch.float16:
            return node
        lowest = self.emit(torch.lt, node, _LEAST)
        return self.emit(torch.where, lowest, self.emit(torch.mul, node, 1e-8), node)

    def _mask(self) -> tuple[fx.Node | None, fx.Node | None]:
        """Return the mask, and the rows whose weights are all equal, because one number has filled
        all their scores.
        """
        form = self.form
        cleared = [[fill for fill in form.fills if _alike(fill, zero)] for zero in form.zeros]
        if not all(cleared):
            raise Stays("weights are set to 0 that the softmax has not hidden")
        for fill in form.fills:
            if not fill.value <= _HIDES:
                raise Stays(f"its scores are filled with {fill.value:g}, which hides no key")
        soft = [fill for fill in form.fills if fill.value > -math.inf]
        hard = [fill for fill in form.fills if fill not in soft]
        if len({fill.value for fill in soft}) > 1:
            raise Stays("its masks fill with two numbers")
        if hard and soft and form.fills.index(hard[0]) < form.fills.index(soft[-1]):
            raise Stays("a mask fills with a finite number after -inf")
        visible = self._all(hard + soft)
        if visible and self._is_causal(evaluated(visible, _MOST, self.history.values)):
            return None, None
        left = [fill for fill in soft if not any(fill in fills for fills in cleared)]
        if visible is None or form.sink is not None or not left:
            return visible, None
        if form.zeros:
            raise Stays("weights are set to 0 by one of its masks alone")
        seen = self.emit(torch.any, visible, -1, keepdim=True)
        empty = self.emit(torch.logical_not, seen)
        others = self._all(hard)
        shown = empty if others is None else self.emit(torch.logical_and, empty, others)
        return self.emit(torch.logical_or, visible, shown), empty

    def _all(self, fills: list[Fill]) -> fx.Node | None:
        result: fx.Node | None = None
        for fill in fills:
            node = self._fine(fill.mask)
            if tensor(node).dtype is not torch.bool:
                raise Stays("a mask is not boolean")
            node = node if fill.keeps else self._negated(node)
            result = node if result is None else self.emit(torch.logical_and, result, node)
        return None if result is None else self._merged(result)

    def _negated(self, node: fx.Node) -> fx.Node:
        return self.emit(torch.logical_not, node)


def _was(node: fx.Node, dtype: torch.dtype) -> bool:
    """Return whether a tensor only casts one of this dtype."""
    while tensor(node).dtype != dtype and (is_cast(node) or is_permute(node) or is_reshape(node)):
        node = source(node)
    return tensor(node).dtype == dtype


def _alike(a: Fill, b: Fill) -> bool:
    """Return whether two fills replace the same elements."""
    (x, x_keeps), (y, y_keeps) = _kept(a), _kept(b)
    dims = [[flat(dim) for dim in fill.mask.dims if dim] for fill in (a, b)]
    return dims[0] == dims[1] and x_keeps == y_keeps and _equal(x, y)


def _kept(fill: Fill) -> tuple[fx.Node, bool]:
    """Return the mask of a fill without negations, and whether it keeps."""
    mask, keeps = fill.mask.node, fill.keeps
    while name(mask) in ("logical_not", "bitwise_not", "invert"):
        if is_written(mask) or is_written(source(mask)):
            break
        mask, keeps = source(mask), not keeps
    return mask, keeps


def _equal(a: Any, b: Any) -> bool:
    """Return whether two nodes are one, or the same function of the same tensors."""
    if a is b or not (isinstance(a, fx.Node) and isinstance(b, fx.Node)):
        return a is b or (type(a) is type(b) and repr(a) == repr(b))
    if a.target != b.target or not name(a) or any(x in name(a) for x in RANDOM):
        return False
    (x, of_x), (y, of_y) = (tree_flatten((node.args, node.kwargs)) for node in (a, b))
    nodes = a, b, *a.all_input_nodes, *b.all_input_nodes
    return of_x == of_y and not any(map(is_written, nodes)) and all(map(_equal, x, y))
