"""The order in which the programs of attention start: that no result depends on it, that each block
is computed once, and that the longest blocks of a section come first.
"""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fastformer as ff
from fastformer import plans, use_backend

plan = pytest.importorskip("fastformer.kernels.attention.plan")
launch = pytest.importorskip("fastformer.kernels.launch")

B, H, G, S, D, TILE = 2, 4, 2, 40, 16, 16
HEAD = S * 2 * D * 4  # bytes of the keys and values of a head
BLOCKS = -(-S // TILE)
NAMES = {"forward_kernel": "forward", "backward_dq_kernel": "dq", "backward_dkdv_kernel": "dkdv"}


def start_order(kernel, heads, blocks, section):
    """The (head, block) of each program in the order in which they start: section by section, and
    the longest blocks of all heads of a section first.
    """
    longest_first = range(blocks) if kernel == "dkdv" else range(blocks - 1, -1, -1)
    for first in range(0, heads, section):
        for block in longest_first:
            yield from ((head, block) for head in range(first, first + section))


@pytest.fixture
def programs(monkeypatch):
    """programs(call): of each kernel of the call the grid and its programs, as a GPU starts them:
    how many tiles a program visits, and the (head, block) that it writes (interpreter only).
    """
    if torch.cuda.is_available():
        pytest.skip("recorded in the interpreter")
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    launched, found = {}, []

    def run(self, *given, former=executor.__call__, **named):
        found.clear()
        former(self, *given, **named)
        if self.fn.__name__ in NAMES:
            name = NAMES[self.fn.__name__]
            first = min(x.address for x in found)
            width = 4 if name == "forward" else 4 * D  # of lse, or of a gradient
            for x in sorted(found, key=lambda x: x.index[::-1]):
                head, row = divmod((x.address - first) // width, S)
                x.block = head, row // TILE
                launched.setdefault(name, SimpleNamespace(grid=self.grid, programs=[]))
                launched[name].programs.append(x)

    def start(self, *index, former=builder.set_grid_idx):
        found.append(SimpleNamespace(index=index, tiles=0, address=None))
        former(self, *index)

    def product(self, *operands, former=builder.create_dot):
        found[-1].tiles += 1
        return former(self, *operands)

    def store(self, pointers, value, mask, *rest, former=builder.create_masked_store):
        if found[-1].address is None and mask.data.any():
            places = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
            found[-1].address = int(places.min())
        return former(self, pointers, value, mask, *rest)

    monkeypatch.setattr(executor, "__call__", run)
    monkeypatch.setattr(builder, "set_grid_idx", start)
    monkeypatch.setattr(builder, "create_dot", product)
    monkeypatch.setattr(builder, "create_masked_store", store)

    def programs(call):
        launched.clear()
        call()
        return dict(launched)

    return programs


@pytest.fixture
def sections(monkeypatch, tiles):
    """sections(heads): from here on as many key-value heads fit into the L2 cache; 0: the programs
    start head by head.
    """
    tiles(TILE, TILE)
    monkeypatch.setattr(plan, "bounds_pay", lambda *_: True)

    def sections(heads):
        plans.forget()
        monkeypatch.setattr(plan, "l2_cache", lambda _: heads * HEAD)
        monkeypatch.setattr(plan, "MOST_PROGRAMS", 65535 if heads else 0)

    return sections


def inputs():
    shapes = (B, H, S, D), (B, G, S, D), (B, G, S, D)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def run(given, **options):
    """The output and all gradients; of a packed batch where the options have its offsets."""
    with use_backend("triton"):
        if "max_q" in options:
            out = ff.packed_attention(*(x[0].transpose(0, 1) for x in given), **options)
        else:
            out = ff.scaled_dot_product_attention(*given, enable_gqa=True, **options)
        return out.detach(), *torch.autograd.grad(out.sin().sum(), given)


ONES = torch.ones(S, S)
UNEVEN = {  # calls whose last blocks of queries, and first of keys, have the most tiles
    "causal": dict(is_causal=True),
    "bottom-right": dict(is_causal=True, causal_alignment="bottom_right"),
    "causal window": dict(window=(20, 0)),
    "mask": dict(attn_mask=ONES.tril() > 0),
    "bias": dict(bias=torch.zeros(S, S).masked_fill(ONES.triu(1) > 0, float("-inf"))),
}
TO_THE_LEFT = dict(window=(5, None))  # the other way round
EVEN = {
    "plain": {},
    "lengths": dict(key_lengths=torch.tensor([S, 9])),
    "mask of keys": dict(attn_mask=torch.arange(S) < 30),
}
# The heads of a section by the key-value heads that the L2 cache holds, of 4 in all: for the
# kernels that read keys and values, and for dK and dV, which read the queries of two heads.
SECTIONS = {1: (2, 1), 3: (4, 1), 5: (8, 2), 8: (8, 4)}


@pytest.mark.sample
@pytest.mark.parametrize("cached", SECTIONS)
@pytest.mark.parametrize("name", [*UNEVEN, "window to the left"])
def test_the_longest_blocks_of_a_section_come_first(programs, sections, name, cached):
    """And each block is computed once, by one program, in the expected order."""
    sections(cached)
    found = programs(lambda: run(inputs(), **UNEVEN.get(name, TO_THE_LEFT)))
    assert sorted(found) == ["dkdv", "dq", "forward"]
    for kernel, launched in found.items():
        section, heads = SECTIONS[cached][kernel == "dkdv"], B * (G if kernel == "dkdv" else H)
        assert launched.grid == (section, BLOCKS, heads // section)
        blocks = [x.block for x in launched.programs]
        assert sorted(blocks) == [*product(range(heads), range(BLOCKS))]
        length, tiles = section * BLOCKS, [x.tiles for x in launched.programs]
        for first in range(0, len(tiles), length):
            of_section = tiles[first : first + length]
            assert of_section == sorted(of_section, reverse=True)
            assert of_section[0] > of_section[-1]
        if name in UNEVEN:
            assert blocks == [*start_order(kernel, heads, BLOCKS, section)]


@pytest.mark.parametrize("name", EVEN)
def test_even_calls_start_head_by_head(programs, sections, name):
    sections(4)
    for kernel, launched in programs(lambda: run(inputs(), **EVEN[name])).items():
        heads = B * (G if kernel == "dkdv" else H)
        assert launched.grid == (heads * BLOCKS, 1, 1)
        blocks = [x.block for x in launched.programs]
        assert blocks == [*start_order(kernel, heads, BLOCKS, section=1)]


OFFSETS = torch.tensor([0, 10, 12, S], dtype=torch.int32)
EVERY = {
    **UNEVEN,
    "window to the left": TO_THE_LEFT,
    "together": dict(
        is_causal=True,
        key_lengths=torch.tensor([S, 9]),
        alibi_slopes=torch.rand(H),
        dropout_p=0.2,
        dropout_seed=3,
    ),
    "packed": dict(
        is_causal=True, cu_seqlens_q=OFFSETS, cu_seqlens_k=OFFSETS, max_q=S - 12, max_k=S - 12
    ),
}


@pytest.mark.parametrize("name", EVERY)
def test_no_bit_depends_on_the_order(sections, name):
    given, found = inputs(), []
    for cached in (0, *SECTIONS) if name in ("together", "packed") else (0, 3):
        sections(cached)
        found.append(run(given, **EVERY[name]))
    assert all(torch.equal(x, y) for results in found for x, y in zip(results, found[0]))


def test_the_heads_of_a_section():
    """The largest divisor of the heads that the cache holds, or else one head."""
    for heads, cache in product(range(1, 40), (0, 1, 5, 8, 30, 100)):
        divisors = [n for n in range(1, heads + 1) if heads % n == 0 and n <= max(1, cache)]
        assert plan.heads_of_section(heads, 7, 7 * cache + 6) == max(divisors)
    assert plan.heads_of_section(0, 7, 100) == 0
    assert plan.heads_of_section(6, 0, 100) == 6


@pytest.mark.parametrize("heads, length", [(65537, 200), (7, 65536 * TILE)])
def test_a_grid_that_a_gpu_does_not_start(sections, heads, length):
    """It starts at most 65535 programs along the second and the third axis."""
    sections(1)

    def grid(heads, length):
        x = torch.empty(heads, 1, length, D, device="meta")
        return plan.ForwardPlan(x, x, x, plan.Attention(None, 0.0, True, 1.0)).forward._grid

    assert grid(heads, length) == (heads * -(-length // TILE), 1, 1)
    heads, length = min(heads, 65535), min(length, 65535 * TILE)
    assert grid(heads, length) == (1, -(-length // TILE), heads)
