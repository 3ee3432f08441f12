"""The kernels in Gluon beside those that are shipped: attention forward, dQ, and dK and dV.

Each kernel runs alone, with that of delta in the backward, and `gluon` is the first of its rows
that takes the call. What is decided by these figures was written down before they were known: a
kernel in Gluon stays if it is at least 1.15 times as fast as the shipped one at 1024 or at 4096
tokens (docs/first_run.md).

FLOPs: 4 B H S S D forward, 6 for dQ (three products), 8 for dK and dV (four); with padding the
valid keys.
"""

import pytest
import torch

from benchmarks.peers import available, check_agreement

HEADS, DIM, P = 8, 64, 0.1
PRODUCTS = {"forward": 2, "dq": 3, "dkdv": 4}
PROVIDERS = ["shipped", "gluon"] if available("triton") else []


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("length", [1024, 4096])
@pytest.mark.parametrize("case", ["plain", "padding+dropout"])
@pytest.mark.parametrize("kernel", PRODUCTS)
def test_kernel(measure, random, device, batch, length, case, kernel, provider):
    from fastformer.kernels import tuned

    shape = batch, length, HEADS, DIM
    q, k, v, grad = (random(*shape).detach().transpose(1, 2) for _ in range(4))
    lengths = torch.linspace(0, length, batch + 2, device=device)[1:-1].int()
    call = _call(kernel, case, (q, k, v), grad, lengths)
    with tuned.forced({}) as asked:
        expected = call()
    name = f"attention {kernel}"
    options = next(key.options() for key in asked if key.kernel == name)
    row = next((x for x in options if isinstance(x, str)), None)
    if row is None:
        pytest.skip("there is no kernel in Gluon for this call, or none in this Triton")
    chosen = {name: row} if provider == "gluon" else {}
    with tuned.forced(chosen):
        for want, *found in zip(expected, call(), call()):
            assert torch.equal(*found), "two runs give different bits"
            check_agreement(provider, found[0].float(), want.float(), 0.02)
        valid = batch * length if case == "plain" else int(lengths.sum())
        measure(
            call,
            group=f"Gluon {kernel} {case} d={DIM} S={length}",
            backend="triton",
            flops=2 * PRODUCTS[kernel] * HEADS * DIM * length * valid,
            heads=HEADS,
            head_dim=DIM,
            valid_keys=valid,
            row=str(row),
        )


def _call(kernel, case, inputs, grad, lengths):
    """Return a call of one kernel, which returns its results."""
    from fastformer.kernels.attention import launchers

    from fastformer.description import Attention, pack

    options = dict(scale=DIM**-0.5, attn_mask=None, dropout_p=0.0, is_causal=False)
    if case != "plain":
        seed = torch.zeros(1, dtype=torch.int64, device=grad.device)
        options |= dict(key_lengths=lengths, dropout_p=P, dropout_seed=seed)
    call = pack([*inputs, Attention(**options)])
    saved = launchers.forward(*call, False)
    if kernel == "forward":
        return lambda: launchers.forward(*call, False)[:1]
    wanted = [0] if kernel == "dq" else [1, 2]
    needs = [i in wanted for i in range(5)]
    return lambda: [launchers.backward(grad, None, *call, *saved, needs)[i] for i in wanted]
