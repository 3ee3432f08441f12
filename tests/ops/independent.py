"""The ops once more, in NumPy and float64, from the papers and from the contract in the docstrings
of `functional`: nothing here comes from the reference or from the kernels, Philox included.

Each function also takes complex arrays. It is built from analytic functions, and branches on real
parts alone, so that Im f(x + ih d) / h at h = 1e-30 is its derivative in the direction d to the
last digit (Squire and Trapp 1998, "Using Complex Variables to Estimate Derivatives of Real
Functions"): the gradients need no formulas of their own.
"""

import math

import numpy as np

M32, M64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF

# ----------------------------------------------------------------------------------------- dropout


def philox(counter, seed, rounds=7):
    """The four words of Philox4x32 (Salmon et al. 2011, section 3.3) of a counter of four arrays
    and a key of 64 bits.
    """
    a, b, c, d = (np.asarray(x, np.uint64) for x in np.broadcast_arrays(*counter))
    low, high = seed & M32, seed >> 32 & M32
    for _ in range(rounds):
        x, y = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        shift, mask = np.uint64(32), np.uint64(M32)
        a, b, c, d = (
            (y >> shift) ^ b ^ np.uint64(low), y & mask,
            (x >> shift) ^ d ^ np.uint64(high), x & mask,
        )  # fmt: skip
        low, high = low + 0x9E3779B9 & M32, high + 0xBB67AE85 & M32
    return np.stack([a, b, c, d])


def philox_of_two(c, d, key):
    """The two words of Philox2x32 (likewise) of a counter of two arrays and a key of 32 bits."""
    c, d = (np.asarray(x, np.uint64) for x in np.broadcast_arrays(c, d))
    for _ in range(7):
        x = c * np.uint64(0xD256D193)
        c, d = (x >> np.uint64(32)) ^ d ^ np.uint64(key), x & np.uint64(M32)
        key = key + 0x9E3779B9 & M32
    return c, d


def splitmix(n, seed):
    """Output n = 1, 2, .. of SplitMix64 (Steele et al. 2014) that starts at the seed."""
    z = seed + n * 0x9E3779B97F4A7C15 & M64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & M64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & M64
    return z ^ z >> 31


def kept(words, p):
    """1 / (1 - p) where an element is kept, else 0; words of 16 bits."""
    p = round(p * 2**16) / 2**16
    return np.zeros(words.shape) if p == 1 else (words >= p * 2**16) / (1 - p)


def tile_words(rows, columns, batch_head, seed):
    """Of rows and columns of scores, or of the hidden elements of a feed-forward, batch_head 0: an
    element takes the low half, or the high one if j // 8 is odd, of the first word, or the second
    if i // 8 is odd, of counter (i', j' ^ shift), in which x' numbers x with bit 3 left out. Output
    batch_head + 1 of SplitMix64 gives the key, its low word, and the shift, its high word.
    """
    i, j = np.reshape(rows, (-1, 1)), np.reshape(columns, (1, -1))
    z = splitmix(batch_head + 1, seed)
    words = philox_of_two(i // 16 * 8 + i % 8, j // 16 * 8 + j % 8 ^ z >> 32, z & M32)
    word = np.where(i // 8 % 2, words[1], words[0])
    return np.where(j // 8 % 2, word >> np.uint64(16), word & np.uint64(0xFFFF))


def tile_factors(shape, batch_head, p, seed):
    """Of [rows, columns]."""
    return kept(tile_words(*map(np.arange, shape), batch_head, seed), p) if p else 1.0


def row_factors(shape, p, seed):
    """Of [rows, features]: the high half of word j mod 4 of counter (j // 4, low word of i, high
    word of i, 1).
    """
    if not p:
        return 1.0
    i, j = np.arange(math.prod(shape[:-1]))[:, None], np.arange(shape[-1])[None, :]
    words = philox((j // 4, i & M32, i >> 32, 1), seed)
    chosen = np.broadcast_to(j % 4, words.shape[1:])
    return kept(np.take_along_axis(words, chosen[None], 0)[0] >> np.uint64(16), p).reshape(shape)


# --------------------------------------------------------------------------------------- attention


def one_head(
    q, k, v, seen, bias, *, keys, slope, sink, factors, scale=None, is_causal=False, window=None,
    causal_alignment="top_left", softcap=None,
):  # fmt: skip
    """(output [Sq, Dv], log-sum-exp [Sq], weights [Sq, Sk]) of one head of one sequence."""
    i, j = np.arange(len(q))[:, None], np.arange(len(k))[None, :]
    shift = keys - len(q) if causal_alignment == "bottom_right" else 0
    left, right = (None, None) if window is None else window
    seen = seen & (j < keys) & (bias.real > -2.3586e38)
    if is_causal:
        seen = seen & (j <= i + shift)
    if left is not None:
        seen = seen & (j >= i + shift - left)
    if right is not None:
        seen = seen & (j <= i + shift + right)
    x = (q.shape[1] ** -0.5 if scale is None else scale) * (q @ k.T)
    if softcap is not None:
        x = softcap * np.tanh(x / softcap)
    x = np.where(seen, x + np.where(seen, bias, 0) - slope * abs(i + shift - j), 0)
    top = np.where(seen, x.real, -np.inf).max(1, initial=-np.inf, keepdims=True)
    top = np.where(top == -np.inf, 0, top)
    weights = np.where(seen, np.exp(x - top), 0)
    total = weights.sum(1, keepdims=True) + np.exp(sink - top)
    some = total.real > 0
    weights = weights / np.where(some, total, 1)
    lse = np.where(some, np.log(np.where(some, total, 1)) + top, -np.inf)[:, 0]
    return (factors * weights) @ v, lse, weights


def attention(
    query, key, value, attn_mask=None, bias=None, key_lengths=None, *, alibi_slopes=None,
    sinks=None, dropout_p=0.0, dropout_seed=0, enable_gqa=True, return_lse=True, **form,
):  # fmt: skip
    """(output [B, H, Sq, Dv], lse [B, H, Sq], weights [B, H, Sq, Sk])."""
    (batch, heads, rows), (groups, columns) = query.shape[:3], key.shape[1:3]
    full = (batch, heads, rows, columns)
    seen = np.broadcast_to(True if attn_mask is None else attn_mask, full)
    bias = np.broadcast_to(0.0 if bias is None else bias, full)
    slopes = np.broadcast_to(0.0 if alibi_slopes is None else alibi_slopes, full[:2])
    sinks = np.full(heads, -np.inf) if sinks is None else sinks
    keys = [columns] * batch if key_lengths is None else key_lengths
    results = [
        one_head(
            query[b, h], key[b, h * groups // heads], value[b, h * groups // heads],
            seen[b, h], bias[b, h], keys=int(keys[b]), slope=slopes[b, h], sink=sinks[h],
            factors=tile_factors((rows, columns), b * heads + h, dropout_p, dropout_seed), **form,
        )
        for b, h in np.ndindex(batch, heads)
    ]  # fmt: skip
    return [np.stack(x).reshape(batch, heads, *x[0].shape) for x in zip(*results)]


def packed_attention(
    query, key, value, cu_seqlens_q, cu_seqlens_k, *, sinks=None, dropout_p=0.0, dropout_seed=0,
    max_q=0, max_k=0, bias=None, alibi_slopes=None, return_lse=True, attn_mask=None, **form,
):  # fmt: skip
    """(output [Tq, H, Dv], lse [H, Tq]). With a mask, dropout counts the tokens of all."""
    heads, groups, batch = query.shape[1], key.shape[1], len(cu_seqlens_q) - 1
    sinks = np.full(heads, -np.inf) if sinks is None else sinks
    bias = np.zeros(len(key)) if bias is None else bias
    slopes = np.broadcast_to(0.0 if alibi_slopes is None else alibi_slopes, (batch, heads))
    kind = np.result_type(query, key, value, sinks, bias)
    output = np.zeros((len(query), heads, value.shape[2]), kind)
    lse = np.zeros((heads, len(query)), kind)
    for b, h in np.ndindex(batch, heads):
        rows, columns = (slice(*n[b : b + 2]) for n in (cu_seqlens_q, cu_seqlens_k))
        shape, g = (rows.stop - rows.start, columns.stop - columns.start), h * groups // heads
        seen = np.ones(shape, bool)
        if attn_mask is None:
            factors = tile_factors(shape, b * heads + h, dropout_p, dropout_seed)
        else:
            seen = attn_mask[0, h % attn_mask.shape[1]][rows, columns]
            factors = tile_factors((len(query), len(key)), h, dropout_p, dropout_seed)
            factors = factors[rows, columns] if dropout_p else factors
        output[rows, h], lse[h, rows], _ = one_head(
            query[rows, h], key[columns, g], value[columns, g], seen,
            np.broadcast_to(bias[columns], shape), keys=shape[1], slope=slopes[b, h],
            sink=sinks[h], factors=factors, **form,
        )  # fmt: skip
    return [output, lse]


# ------------------------------------------------------------------------------------------- norms


def normalized(x, weight, bias, eps, unbiased):
    x = x - x.mean(-1, keepdims=True)
    if unbiased:
        x = x / (np.sqrt((x * x).sum(-1, keepdims=True) / (x.shape[-1] - 1)) + eps)
    else:
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return x * (1 if weight is None else weight) + (0 if bias is None else bias)


def layer_norm(input, weight=None, bias=None, *, normalized_shape, eps=1e-5, unbiased=False):
    return [normalized(input, weight, bias, eps, unbiased)]


def rms_norm(input, weight=None, *, normalized_shape, eps):
    x = input / np.sqrt((input * input).mean(-1, keepdims=True) + eps)
    return [x * (1 if weight is None else weight)]


def added(x, residual, bias, dropout_p, dropout_seed):
    factors = row_factors(x.shape, dropout_p, dropout_seed)
    return residual + factors * (x if bias is None else x + bias)


def dropout_add_layer_norm(
    input, residual, weight, bias=None, *, dropout_p=0.0, dropout_seed=0, eps=1e-5, unbiased=False,
    input_bias=None,
):  # fmt: skip
    total = added(input, residual, input_bias, dropout_p, dropout_seed)
    return [normalized(total, weight, bias, eps, unbiased), total]


def dropout_add_rms_norm(
    input, residual, weight, *, dropout_p=0.0, dropout_seed=0, eps, input_bias=None
):  # fmt: skip
    total = added(input, residual, input_bias, dropout_p, dropout_seed)
    return [*rms_norm(total, weight, normalized_shape=None, eps=eps), total]


# ------------------------------------------------------------------------------------ feed-forward


def erf(z):
    """Of z.real, and to first order in z.imag."""
    real = np.vectorize(math.erf, [float])(z.real)
    return real + 1j * z.imag * 2 / math.sqrt(math.pi) * np.exp(-(z.real**2))


ACTIVATIONS = {
    "relu": lambda z: np.where(z.real > 0, z, 0),
    "gelu": lambda z: z * (1 + erf(z / math.sqrt(2))) / 2,
    "gelu_tanh": lambda z: z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2,
    "silu": lambda z: z / (1 + np.exp(-z)),
    "sigmoid": lambda z: 1 / (1 + np.exp(-z)),
    "relu2": lambda z: np.where(z.real > 0, z, 0) ** 2,
}


def linear(x, w, b):
    return x @ w.T + (0 if b is None else b)


def hidden_factors(shape, p, seed):
    flat = math.prod(shape[:-1]), shape[-1]
    return tile_factors(flat, 0, p, seed).reshape(shape) if p else 1.0


def feed_forward(input, w_1, b_1, w_2, b_2, *, activation, dropout_p=0.0, dropout_seed=0):
    h = ACTIVATIONS[activation](linear(input, w_1, b_1))
    return [linear(hidden_factors(h.shape, dropout_p, dropout_seed) * h, w_2, b_2)]


def gated(kind):
    def function(input, w, b, w_2, b_2, *, dropout_p=0.0, dropout_seed=0, **form):
        z, v = np.split(linear(input, w, b), 2, -1)
        (h,) = gated_activation(z, v, activation=kind, **form)
        return [linear(hidden_factors(h.shape, dropout_p, dropout_seed) * h, w_2, b_2)]

    return function


def gated_activation(gate, value, *, activation="silu", alpha=1.0, limit=None, offset=0.0):
    if limit is not None:
        gate = np.where(gate.real <= limit, gate, limit)
        value = np.where(abs(value.real) <= limit, value, np.sign(value.real) * limit)
    f = ACTIVATIONS[activation](gate) if alpha == 1 else gate / (1 + np.exp(-alpha * gate))
    return [f * (value + offset)]


# ------------------------------------------------------------------------------- embedding, losses


def embed(
    tokens, weight, positional=None, *, scale=None, padding_idx=None, dropout_p=0.0, dropout_seed=0,
):  # fmt: skip
    if padding_idx is not None:  # its row has a value and no derivative
        weight = np.where(np.arange(len(weight))[:, None] == padding_idx, weight.real, weight)
    y = (weight.shape[1] ** 0.5 if scale is None else scale) * weight[tokens]
    if positional is not None:
        y = y + positional[: tokens.shape[-1]]
    return [row_factors(y.shape, dropout_p, dropout_seed) * y]


def rotary_embedding(
    query, key, cos, sin, *, interleaved=False, query_norm=None, key_norm=None, eps=1e-6
):
    """Each pair as a complex number would be turned, but with cos and sin of its own for each of
    both features. Tokens come before heads here.
    """
    dim, width = query.shape[-1], cos.shape[-1]
    first = np.arange(0, width, 2) if interleaved else np.arange(width // 2)
    second = first + (1 if interleaved else width // 2)
    found = []
    for x, weight in ((query, query_norm), (key, key_norm)):
        y = x.swapaxes(1, 2) if x.ndim == 4 else x
        if weight is not None:
            y = weight * y / np.sqrt((y * y).sum(-1, keepdims=True) / dim + eps)
        c, s = cos[..., None, :], sin[..., None, :]
        out = y.copy()
        out[..., first] = y[..., first] * c[..., first] - y[..., second] * s[..., first]
        out[..., second] = y[..., second] * c[..., second] + y[..., first] * s[..., second]
        found.append(out.swapaxes(1, 2) if x.ndim == 4 else out)
    return found


def log_softmax(logits, softcap, temperature):
    """And the log-sum-exp of the last dimension."""
    x = (logits if softcap is None else softcap * np.tanh(logits / softcap)) / temperature
    top = x.real.max(-1, keepdims=True)
    lse = np.log(np.exp(x - top).sum(-1, keepdims=True)) + top
    return x - lse, lse[..., 0]


def cross_entropy(
    logits, target, *, reduction="mean", ignore_index=-100, label_smoothing=0.0,
    smoothing="uniform", weight=None, z_loss=0.0, softcap=None, temperature=1.0,
    return_entropy=False,
):  # fmt: skip
    classes, counts = logits.shape[-1], target != ignore_index
    logp, lse = log_softmax(logits, softcap, temperature)
    w = np.ones(classes) if weight is None else weight
    t = np.where(counts, target, 0)[..., None]
    q = np.full(logits.shape, label_smoothing / (classes - 2 * (smoothing == "kl")))
    if smoothing == "kl":
        q[..., ignore_index], own = 0, 1 - label_smoothing
    else:
        own = 1 - label_smoothing + label_smoothing / classes
    np.put_along_axis(q, t, own, -1)
    losses = -(w * q * logp).sum(-1)
    if smoothing == "kl":
        losses = losses + (w * q * np.log(np.where(q > 0, q, 1))).sum(-1)
    squares = z_loss * lse**2
    entropies = -(np.exp(logp) * logp).sum(-1)
    losses, squares, entropies = (np.where(counts, x, 0) for x in (losses, squares, entropies))
    found = losses + squares
    if reduction == "sum":
        found = found.sum()
    elif reduction == "mean":
        found = losses.sum() / w[t][counts].sum() + squares.sum() / counts.sum()
    return [found, entropies] if return_entropy else [found]


def linear_kl_div(
    input, linear_weight, teacher_input, teacher_weight, *, linear_bias=None, teacher_bias=None,
    mask=None, reduction="mean", reverse=False, temperature=1.0, softcap=None,
):  # fmt: skip
    of_teacher = linear(teacher_input, teacher_weight, teacher_bias)
    q, _ = log_softmax(linear(input, linear_weight, linear_bias), softcap, temperature)
    p, _ = log_softmax(of_teacher, softcap, temperature)
    q, p = (p, q) if reverse else (q, p)
    rows = (np.exp(p) * (p - q)).sum(-1)
    kept = np.ones(rows.shape, bool) if mask is None else mask
    rows = np.where(kept, rows, 0)
    if reduction == "none":
        return [rows]
    return [rows.sum() / (kept.sum() if reduction == "mean" else 1)]


def linear_cross_entropy(input, linear_weight, target, linear_bias=None, **options):
    return [*cross_entropy(linear(input, linear_weight, linear_bias), target, **options)]
