"""Counts what a rewriter of Dynamo's graphs is to find, before they are rewritten:

attention     a softmax, or torch's own attention; with routers=False a softmax counts only if a
              product reads it, unlike that of a router of experts
norm          layer_norm and rms_norm, or by hand: the root of a mean, in two dimensions or more
              (the root of running statistics is no norm), or `normalize` with the factor
              sqrt(d) (without it the length is one)
feed_forward  an activation between two linear layers, also as the gate of a product; products
              with a matrix (matmul, addmm) count as linear, convolutions do not
"""

import math

from torch import fx

from fastformer.drop_in.graph.nodes import arg, is_cast, is_dropout, is_tensor, name, number, tensor

ATTENTIONS = {"scaled_dot_product_attention", "multi_head_attention_forward"}
PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum"}
ENDS = {  # of the weights: choices of experts, and sums of what was multiplied by the weights
    *("topk", "sort", "argmax", "max", "gather", "scatter"),
    *("add", "iadd", "sum", "mean", "index_add", "linear"),
}
SUMS = {"mean", "sum", "var", "var_mean", "std", "norm", "linalg_norm", "vector_norm"}
ROOTS = {"sqrt", "rsqrt"} | (SUMS - {"mean", "sum", "var", "var_mean"})  # or with a root within
ACTIVATIONS = {
    *("relu", "gelu", "silu", "sigmoid", "tanh", "erf", "elu", "leaky_relu", "mish", "softplus"),
    *("hardswish", "hardtanh", "relu6", "autograd_function_apply"),
}
VIEWS = {"view", "reshape", "flatten", "unflatten", "getitem", "chunk", "split"}
PASSES = VIEWS | {"mul", "div", "pow", "square", "add", "sub", "clamp"}


def is_linear(node):
    if name(node) in ("linear", "addmm"):
        return True
    by = arg(node, 1, "other")
    return name(node) in ("matmul", "mm") and is_tensor(by) and tensor(by).dim() == 2


def passes(node):
    return name(node).rstrip("_") in PASSES or is_cast(node) or is_dropout(node)


def linear_before(node, depth=12):
    """Return the linear layer of which a node is computed element by element, or None."""
    if is_linear(node):
        return node
    given = node.all_input_nodes if isinstance(node, fx.Node) and passes(node) and depth else ()
    return next(filter(None, (linear_before(x, depth - 1) for x in given)), None)


def linear_after(node, depth=12):
    """Return the linear layer that reads a node, perhaps after factors, dropout and casts."""
    for user in node.users if depth else ():
        if is_linear(user):
            return user
        is_sum = name(user).rstrip("_") in ("add", "sub") and len(user.all_input_nodes) > 1
        found = linear_after(user, depth - 1) if passes(user) and not is_sum else None
        if found is not None:
            return found
    return None


def is_attention(node, routers):
    softmax = name(node) in ("softmax", "_softmax") and (routers or is_read(node, set()))
    return name(node) in ATTENTIONS or softmax


def is_read(node, seen):
    """Whether a product reads a node, or what is computed of it without a sum."""
    for user in node.users.keys() - seen:
        seen.add(user)
        called = name(user).rstrip("_")
        ends = called in ENDS and not (called == "linear" and tensor(user).dim() > 3)  # of heads
        if called in PRODUCTS or (not ends and is_read(user, seen)):
            return True
    return False


def is_norm(node):
    called = name(node)
    if called == "normalize":
        factors = (x for user in node.users if name(user) == "mul" for x in user.args)
        root = math.sqrt(tensor(node).shape[arg(node, 2, "dim", 1)])
        return any(math.isclose(number(x) or 0, root) for x in factors)
    by_hand = called in ROOTS and is_tensor(node) and tensor(node).dim() > 1 and is_of_a_sum(node)
    return called in ("layer_norm", "rms_norm") or by_hand


def is_of_a_sum(node, depth=8):
    """Whether a node is a sum, a mean or a variance, or is computed of one element by element."""
    if not isinstance(node, fx.Node):
        return False
    given = node.all_input_nodes if name(node) in ROOTS | PASSES or is_cast(node) else ()
    return name(node) in SUMS or (depth > 0 and any(is_of_a_sum(x, depth - 1) for x in given))


def count(gm, wanted, routers=True):
    """Add to a Counter what is in a graph, and in the graphs of its regions."""
    taken = set()  # the second linear layers: of three in a row the first two are one feed-forward
    for inner in gm.children():
        if isinstance(inner, fx.GraphModule):
            count(inner, wanted, routers)
    for node in gm.graph.nodes:
        wanted["attention"] += is_attention(node, routers)
        wanted["norm"] += is_norm(node)
        if name(node).rstrip("_") in ACTIVATIONS:
            found = filter(None, map(linear_before, node.all_input_nodes))
            first, second = next(found, None), linear_after(node)
            if first is not None and second is not None and first not in taken:
                wanted["feed_forward"] += 1
                taken.add(second)
