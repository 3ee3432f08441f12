"""The providers that a suite compares: which of them can run here, why the others cannot, and how
each is called.
"""

import importlib
import importlib.util

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastformer as ff

GPU = torch.cuda.is_available()
BACKENDS = ["auto", "reference", "triton"] if GPU else ["auto"]  # of whole models
ABSENT = {}  # provider: the reason why `available` left it out
# torch's default attention has not been the fastest one on every GPU, so each backend is forced.
FORCED = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def available(*names):
    """Return the providers that can run here. ABSENT keeps the reasons of the others, and the
    closing table prints them.
    """
    for name in names:
        reason = _obstacle(name)
        if reason is not None:
            ABSENT[name] = reason
    return [name for name in names if name not in ABSENT]


def _obstacle(name):
    if name == "torch fused" and not hasattr(F, "linear_cross_entropy"):
        return f"torch {torch.__version__} has no linear_cross_entropy"
    if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
        return f"{PACKAGES[name]} is not installed"
    if name in ON_GPU and not GPU:
        return ON_GPU[name]
    return None


PACKAGES = {
    "liger": "liger_kernel",
    "quack": "quack",
    "flash-attn": "flash_attn",
    "flash-attn 3": "flash_attn_interface",
}

ON_GPU = dict.fromkeys(
    ["packed", "cudnn", "flash", "efficient", "varlen", "addmm_activation", *PACKAGES, "read"],
    "needs a GPU",
) | {
    **dict.fromkeys(
        ["triton", "batch_invariant"], "needs a GPU: the speed of the interpreter means nothing"
    ),
    "compile": "is compared on a GPU alone",
    "flex": "flex_attention has no gradient on a CPU",
}


def compiled(function):
    """Compile a function, again for each shape. On a CPU no suite calls it, and it is returned
    unchanged.
    """
    return torch.compile(function, dynamic=False) if GPU else function


def with_torch(function, **others):
    """Return the peers of an op: torch's function, the same compiled, and others."""
    return {"torch": function, "compile": compiled(function), **others}


def implementation(provider, peers, ours):
    """Return the function of a peer, or `ours` on the backend of that name."""
    if provider in peers:
        return peers[provider]

    def on_backend(*inputs):
        with ff.use_backend(provider):
            return ours(*inputs)

    return on_backend


def flash_attn(provider):
    """Import the package of flash-attn or flash-attn 3."""
    return importlib.import_module(PACKAGES[provider])


def sdpa(provider, *inputs, **options):
    """Call torch's attention, by its backend of that name if it is one of FORCED."""
    if provider not in FORCED:
        return F.scaled_dot_product_attention(*inputs, **options)
    with sdpa_kernel(FORCED[provider]):
        return F.scaled_dot_product_attention(*inputs, **options)


def tutorial_attention(q, k, v, mask=None, p=0.0, bias=None):
    """Compute attention as the Annotated Transformer does."""
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    return F.dropout(scores.softmax(-1), p) @ v


def tutorial_norm(x, weight, bias, eps=1e-6):
    """Compute LayerNorm as the Annotated Transformer does, with N - 1 in the std."""
    mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
    return weight * (x - mean) / (std + eps) + bias


def rotary_embedding(query, key, cos, sin, query_norm=None, key_norm=None):
    """Turn queries and keys as Llama and Qwen3 of transformers do."""
    rotary, found = cos.shape[-1], []
    cos, sin = cos.to(query.dtype), sin.to(query.dtype)
    for x, weight in ((query, query_norm), (key, key_norm)):
        if weight is not None:
            wide = x if x.dtype == torch.float64 else x.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
            x = weight * wide.to(x.dtype)
        first, rest = x[..., :rotary], x[..., rotary:]
        a, b = first.chunk(2, -1)
        turned = first * cos + torch.cat((-b, a), -1) * sin
        found.append(torch.cat((turned, rest), -1) if rest.shape[-1] else turned)
    return tuple(found)


def backend_of(provider):
    """Return a context in which fastformer runs on the backend of that name, or for a peer on
    `auto`.
    """
    return ff.use_backend(provider if provider in BACKENDS else "auto")


def backend_taken(provider, device):
    """Return the backend on which fastformer runs on the device, or None for a peer."""
    if provider not in BACKENDS:
        return None
    with ff.use_backend(provider):
        return ff.explain("layer_norm", torch.zeros(1, 8, device=device), 8).backend


def check_agreement(provider, actual, expected, bound=None):
    """Fail if the largest error, relative to the largest value, is not below the bound: by default
    50 roundings of the dtype.
    """
    error = (actual - expected).abs().max() / expected.abs().max()
    bound = 50 * torch.finfo(expected.dtype).eps if bound is None else bound
    assert error < bound, f"{provider} differs by {error:.1e}"
