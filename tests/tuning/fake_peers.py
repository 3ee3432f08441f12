"""Functions with the signatures of those that fastformer calls in flash-attn 4.0.0b36, QuACK 0.6.5
and Liger 0.8.5, in eager PyTorch. test_peers.py puts them in the place of the packages, and
compares the signatures with those of the packages that are installed.
"""

import torch

VERSIONS = {"flash-attn-4": "4.0.0b36", "quack-kernels": "0.6.5", "liger-kernel": "0.8.5"}
CALLS = []  # (function, its keyword arguments)

# ----------------------------------------------------------------------------- flash_attn.cute


def _probabilities(q, k, scale, causal, softcap, left, right, sink):
    """Scores and log-sum-exp of [B, S, H, D]: the band is aligned to the last query and key."""
    q, k = (x.transpose(1, 2).double() for x in (q, k))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = scale * q @ k.transpose(-1, -2)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    Sq, Sk = scores.shape[-2:]
    offset = (
        torch.arange(Sk, device=q.device) - torch.arange(Sq, device=q.device)[:, None] - Sk + Sq
    )
    right = 0 if causal else right
    if right is not None:
        scores = scores.masked_fill(offset > right, -torch.inf)
    if left is not None:
        scores = scores.masked_fill(-offset > left, -torch.inf)
    lse = scores.logsumexp(-1)
    if sink is not None:
        lse = torch.logaddexp(lse, sink.double().view(1, -1, 1))
    return (scores - lse[..., None]).exp(), lse


def _attention(q, k, v, *options):
    p, lse = _probabilities(q, k, *options)
    values = v.transpose(1, 2).double().repeat_interleave(q.shape[2] // v.shape[2], 1)
    return (p @ values).transpose(1, 2).to(q.dtype), lse.float()


def _flash_attn_fwd(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
    max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None,
    causal=False, softcap=None, window_size_left=None, window_size_right=None,
    learnable_sink=None, tile_mn=None, mma_pv_is_rs=None, intra_wg_overlap=None, num_threads=384,
    num_splits=1, pack_gqa=None, _arch=None, score_mod=None, mask_mod=None,
    block_sparse_tensors=None, return_lse=False, out=None, lse=None, aux_tensors=None,
    aux_scalars=None, q_descale=None, k_descale=None, v_descale=None, gather_kv_indices=None,
    scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False,
    gather_bwd_recompute_p=False,
):  # fmt: skip
    options = causal, softcap, window_size_left, window_size_right, learnable_sink
    given = dict(q=q, k=k, v=v, out=out, softmax_scale=softmax_scale, return_lse=return_lse)
    CALLS.append(("flash forward", given | dict(zip(NAMES, options))))
    found, lse = _attention(q, k, v, softmax_scale, *options)
    return out.copy_(found), lse if return_lse else None, None, None, None


NAMES = "causal", "softcap", "window_size_left", "window_size_right", "learnable_sink"


def _flash_attn_bwd(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
    window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False,
    num_stages_Q=2, num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False,
    AtomLayoutMSdP=2, AtomLayoutNdKV=2, AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None,
    cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
    deterministic=False, dq=None, dk=None, dv=None, score_mod=None, score_mod_bwd=None,
    mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, dlse=None,
    learnable_sink=None,
):  # fmt: skip
    options = causal, softcap, window_size_left, window_size_right, learnable_sink
    given = dict(dout=dout, lse=lse, deterministic=deterministic, softmax_scale=softmax_scale)
    CALLS.append(("flash backward", given | dict(zip(NAMES, options))))
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    sink = None
    if learnable_sink is not None:
        sink = learnable_sink.detach().double().requires_grad_()
        leaves.append(sink)
    with torch.enable_grad():
        again, _ = _attention(*leaves[:3], softmax_scale, *options[:4], sink)
        grads = torch.autograd.grad(again, leaves, dout.double())
    found = [x.copy_(g) for x, g in zip((dq, dk, dv), grads)]
    return *found, *(x.to(learnable_sink.dtype) for x in grads[3:])


# --------------------------------------------------------------------------------------- QuACK


def _norm(x, weight, bias, eps, centred):
    mean = x.mean(-1) if centred else torch.zeros_like(x[:, 0])
    r = ((x - mean[:, None]).square().mean(-1) + eps).rsqrt()
    y = (x - mean[:, None]) * r[:, None]
    y = y if weight is None else y * weight
    return y if bias is None else y + bias, mean, r


def _norm_backward(x, weight, bias, dy, mean, r, added=None):
    """The gradients of x, weight and bias, from the statistics that the forward gave."""
    x, dy = x.double(), dy.double()
    unit = (x - (0 if mean is None else mean.double()[:, None])) * r.double()[:, None]
    g = dy if weight is None else dy * weight.double()
    dx = g - unit * (g * unit).mean(-1, keepdim=True)
    dx = dx if mean is None else dx - g.mean(-1, keepdim=True)
    dx = dx * r.double()[:, None]
    return dx if added is None else dx + added.double(), (dy * unit).sum(0), dy.sum(0)


def rmsnorm_fwd(
    x, weight=None, bias=None, residual=None, out_dtype=None, residual_dtype=None, eps=1e-6,
    store_rstd=False, weight_offset=0.0,
):  # fmt: skip
    CALLS.append(("quack rms_norm", dict(residual=residual, eps=eps)))
    assert x.dim() == 2 and x.is_contiguous()
    total = x.double() if residual is None else x.double() + residual.double()
    y, _, r = _norm(total, weight, bias, eps, False)
    kept = x if residual is None else total.to(residual.dtype)
    return y.to(x.dtype), kept, r.float() if store_rstd else None


def rmsnorm_bwd(
    x, weight, dout, rstd, dresidual_out=None, has_bias=False, has_residual=False,
    weight_offset=0.0,
):  # fmt: skip
    CALLS.append(("quack rms_norm backward", dict(dresidual_out=dresidual_out)))
    dx, dw, _ = _norm_backward(x, weight, None, dout, None, rstd, dresidual_out)
    dx = dx.to(x.dtype)
    return dx, None if weight is None else dw.to(weight.dtype), None, dx if has_residual else None


def layernorm_fwd(x, weight, bias=None, eps=1e-6, return_rstd=False, return_mean=False):
    CALLS.append(("quack layer_norm", dict(eps=eps)))
    assert x.dim() == 2 and weight.dtype == torch.float32
    y, mean, r = _norm(x.double(), weight, bias, eps, True)
    assert return_rstd and return_mean
    return y.to(x.dtype), r.float(), mean.float()


def layernorm_bwd(x, weight, dout, rstd, mean, has_bias=True):
    CALLS.append(("quack layer_norm backward", dict(has_bias=has_bias)))
    dx, dw, db = _norm_backward(x, weight, None, dout, mean, rstd)
    return dx.to(x.dtype), dw.float(), db.float() if has_bias else None


def cross_entropy_fwd(
    x, target, target_logit=None, weight=None, ignore_index=-100, return_lse=False,
    return_dx=False, inplace_backward=False,
):  # fmt: skip
    CALLS.append(("quack cross_entropy", dict(ignore_index=ignore_index)))
    lse = x.double().logsumexp(-1)
    at = x.double().gather(1, target.clamp(min=0)[:, None])[:, 0]
    loss = torch.where(target == ignore_index, 0.0, lse - at)
    return loss.float(), lse.float()


def cross_entropy_bwd(
    x, target, dloss, lse, weight=None, ignore_index=-100, inplace_backward=False
):
    CALLS.append(("quack cross_entropy backward", dict(ignore_index=ignore_index)))
    assert dloss.shape == lse.shape == target.shape and dloss.is_contiguous()
    p = (x.double() - lse.double()[:, None]).exp()
    p[torch.arange(len(x)), target.clamp(min=0)] -= 1
    g = dloss.double().masked_fill(target == ignore_index, 0.0)
    return (p * g[:, None]).to(x.dtype)


# --------------------------------------------------------------------------------------- Liger

BLOCK, WARPS = 64, 4
_str_to_casting_mode = {"llama": 0, "gemma": 1, "none": -1}


def calculate_settings(n):
    return BLOCK, WARPS


def layer_norm_forward(X, W, B, eps):
    CALLS.append(("liger layer_norm", dict(eps=eps)))
    y, mean, r = _norm(X.double(), W, B, eps, True)
    return y.to(X.dtype), X, mean.float(), r.float(), BLOCK, WARPS


def layer_norm_backward(dY, X, W, B, Mean, RSTD, needs_dw=None, needs_db=None):
    CALLS.append(("liger layer_norm backward", dict(needs_dw=needs_dw, needs_db=needs_db)))
    dx, dw, db = _norm_backward(X, W, B, dY, Mean, RSTD)
    dw, db = dw.to(W.dtype) if needs_dw else None, db.to(B.dtype) if needs_db else None
    return dx.to(X.dtype), dw, db


def rms_norm_forward(X, W, eps, offset, casting_mode, row_mode):
    CALLS.append(("liger rms_norm", dict(eps=eps, offset=offset, casting_mode=casting_mode)))
    assert offset == 0.0 and casting_mode == "gemma"
    y, _, r = _norm(X.double(), W, None, eps, False)
    return y.to(X.dtype), X, r.float(), BLOCK, WARPS, _str_to_casting_mode[casting_mode]


def rms_norm_backward(
    dY, X, W, RSTD, offset, casting_mode, BLOCK_SIZE, num_warps, in_place, row_mode, needs_dw=None
):
    CALLS.append(("liger rms_norm backward", dict(in_place=in_place, casting_mode=casting_mode)))
    assert (offset, casting_mode, BLOCK_SIZE, num_warps, in_place) == (0.0, 1, BLOCK, WARPS, False)
    dx, dw, _ = _norm_backward(X, W, None, dY, None, RSTD)
    return dx.to(X.dtype), dw.to(W.dtype) if needs_dw and W is not None else None


def fused_add_rms_norm_forward(X, R, W, eps, offset, casting_mode):
    CALLS.append(("liger sum", dict(eps=eps, offset=offset, casting_mode=casting_mode)))
    total = X + R
    y, _, r = _norm(total.double(), W, None, eps, False)
    return y.to(X.dtype), total, r.float(), BLOCK, WARPS, 2, _str_to_casting_mode[casting_mode]


def fused_add_rms_norm_backward(
    dY, dS_out, S, W, RSTD, offset, casting_mode, BLOCK_SIZE, num_warps, num_stages, in_place,
    needs_dw=None,
):  # fmt: skip
    CALLS.append(("liger sum backward", dict(in_place=in_place, casting_mode=casting_mode)))
    assert (casting_mode, BLOCK_SIZE, num_warps, num_stages, in_place) == (
        1,
        BLOCK,
        WARPS,
        2,
        False,
    )
    dx, dw, _ = _norm_backward(S, W, None, dY, None, RSTD, dS_out)
    dx = dx.to(S.dtype)
    return dx, dx, dw.to(W.dtype) if needs_dw else None


MODULES = {
    "flash_attn.cute.interface": ("_flash_attn_fwd", "_flash_attn_bwd"),
    "quack.rmsnorm": ("rmsnorm_fwd", "rmsnorm_bwd", "layernorm_fwd", "layernorm_bwd"),
    "quack.cross_entropy": ("cross_entropy_fwd", "cross_entropy_bwd"),
    "liger_kernel.ops.layer_norm": ("layer_norm_forward", "layer_norm_backward"),
    "liger_kernel.ops.rms_norm": ("rms_norm_forward", "rms_norm_backward"),
    "liger_kernel.ops.fused_add_rms_norm": (
        "fused_add_rms_norm_forward",
        "fused_add_rms_norm_backward",
    ),
    "liger_kernel.ops.utils": ("calculate_settings",),
}
