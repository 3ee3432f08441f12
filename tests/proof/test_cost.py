"""The cost ledger: what is read from machine code, and what follows for a tile."""

from importlib.metadata import version

import pytest

pytest.importorskip("triton")

from benchmarks import ROOT
from benchmarks.proof import cases, cost, sass

# The products of a loop as the specialised forward should have it: the scores, then the output,
# whose left operand is in registers; the exponentials stand between the two waits.
OVERLAPPED = """
.L_x_1:
        /*0000*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R64, R8, gdesc[UR8], R64 ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R64, R12, gdesc[UR8], R64, gsb0 ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0050*/                   FMUL R100, R24, R2 ;
        /*0060*/                   MUFU.EX2 R101, R100 ;
        /*0070*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0080*/                   FMUL R64, R64, R2 ;
        /*0090*/                   MUFU.EX2 R102, R3 ;
        /*00a0*/                   F2FP.BF16.F32.PACK_AB R8, R101, R102 ;
        /*00b0*/                   LDL R3, [R1] ;
        /*00c0*/               @P1 BRA `(.L_x_1) ;
        /*00d0*/                   EXIT ;
"""


def loop_of(text):
    code = sass.parse(text)
    [(first, last)] = code.loops()
    return code.instructions[first : last + 1]


def test_exponentials_beside_a_product():
    found = sass.count(loop_of(OVERLAPPED), warps=4)
    assert (found["wgmma"], found["exponential"], found["beside"]) == (4, 2, 1)
    assert found["local"] == 1
    early = OVERLAPPED.replace("gsb0, 0x1", "gsb0, 0x0")
    assert sass.count(loop_of(early), warps=4)["beside"] == 0
    # A product that is waited for in the next pass only.
    late = OVERLAPPED.replace("WARPGROUP.DEPBAR.LE gsb0, 0x0", "NOP")
    assert sass.count(loop_of(late), warps=4)["beside"] == 2


def test_bytes_in_flight():
    """A load, and a copy that two more passes are ahead of: two groups a pass, four may wait."""
    text = """
        /*0000*/                   DEPBAR.LE SB0, 0x4 ;
        /*0010*/                   LDG.E.64 R8, desc[UR6][R4.64] ;
        /*0020*/                   LDGSTS.E.BYPASS.128 [R2], desc[UR6][R4.64] ;
        /*0030*/                   LDGDEPBAR ;
        /*0040*/                   LDGSTS.E [R2], desc[UR6][R4.64] ;
        /*0050*/                   LDGDEPBAR ;
"""
    found = sass.count(sass.parse(text).instructions, warps=2)
    assert found["in_flight"] == 64 * (8 + 3 * (16 + 4))


KNOWN = cost.read(cases.Table.read())
PLAIN = "sm_90 attention bf16 D=64 plain"
COUNTED = (
    *("issue", "exponential", "product", "loaded", "stored", "wgmma", "beside"),
    *sass.UNITS,
)
RECORD = dict(
    kernel="forward", hash="h", blocks=dict(rows=128, columns=64), warps=8, stages=2, registers=107,
    shared=49152, products=[2 * 128 * 64 * 64] * 2, outstanding=[0, 2],
)  # fmt: skip


def test_loops_that_wait_or_grow(tmp_path):

    def ledger(issue, waits):
        loop = dict.fromkeys(COUNTED, 0) | dict(issue=issue, tensor=8, product=2 * 128 * 64 * 64)
        record = {**RECORD, "outstanding": waits, "loops": [loop, loop], "whole": loop}
        return cost.ledger(PLAIN, dict(records=[record]))

    assert cost.waits(ledger(300, [2, 4])) == []
    assert len(cost.waits(ledger(300, [2, 0]))) == len(cost.waits(ledger(300, [2, None]))) == 1
    case = {"key": "d", "costs": cost.rows(ledger(300, [2, 2]))}
    cases.Table("3.7.1", {PLAIN: case}).write(tmp_path / "compile.json")
    table = cases.Table.read(tmp_path / "compile.json")
    assert table.stale({PLAIN: "d"}) == [] and table.stale({PLAIN: "e"}) == [PLAIN]
    known = cost.read(table)[PLAIN]
    assert [entry.issue for entry in known] == [600, 600]
    assert cost.grown(ledger(305, [2, 2]), known) == []
    assert len(cost.grown(ledger(312, [2, 2]), known)) == 2
    assert len(cost.grown(ledger(280, [2, 2]), known)) == 2
    assert "forward: loops edge" in cost.grown(ledger(300, [2, 2])[1:], known)[0]
    assert cost.grown(ledger(300, [2, 2]), known[:0]) == []


def test_loops_that_misuse_registers():
    def wrong(kernel="forward", case=PLAIN, **facts):
        loop = dict.fromkeys(COUNTED, 0) | dict(issue=300, tensor=8, product=2 * 128 * 64 * 64)
        loop |= dict(exponential=34, wgmma=8, beside=34) | facts
        record = {
            **RECORD,
            "kernel": kernel,
            "outstanding": [2],
            "products": [2 * 128 * 64 * 64],
            "whole": loop,
        }
        found = cost.ledger(case, dict(records=[{**record, "loops": [loop]}]))
        return cost.misused_registers(found)

    assert wrong() == wrong(beside=0) == []
    assert "accesses to local memory" in wrong(local=1)[0]
    known = "sm_90 attention bf16 D=128 unaligned 2-D mask, 2-D bias, dropout"
    assert wrong(case=known, local=1) == [] and len(wrong(case=known, local=1000)) == 1
    assert wrong("hopper_forward") == []
    assert "97% of its exponentials" in wrong("hopper_forward", beside=33)[0]


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_the_backward_of_a_norm_keeps_the_memory_busy(op):
    (entry,) = (e for e in KNOWN[f"sm_90 {op} bf16 N=512"] if e.kernel == "backward")
    assert entry.part == "loop" and entry.in_flight > 26


@pytest.mark.parametrize("form", ["", " norm", " interleaved", " partial, norm"])
def test_rotary_positions_are_one_read_and_one_write(form):
    """Of the query and the key forward, and of their gradients backward, where a norm reads the
    query and the key once more.
    """
    entries = KNOWN[f"sm_90 rotary_embedding bf16 D=128{form}"]
    found = [e for e in entries if e.kernel != "add_up"]  # that of the weights' partial gradients
    assert len(found) == 4  # the loops over the heads of query and key, forward and backward
    for e in found:
        passes = 3 if e.kernel == "backward" and "norm" in form else 2
        moved = 128 * 2 * passes
        assert abs(e.moved - moved) < 0.01 * moved
        assert e.in_flight > 26


def test_few_queries_keep_the_memory_busy(compiled):
    """Two programs for each multiprocessor at batch 1 and 4096 keys, and the loads of both."""
    name = "sm_90 decode bf16 D=128 one query, lengths"
    split, merge = compiled(name, translate=True)["records"]
    assert split["programs"] >= 2 * cost.CHIPS["sm_90"].count and merge["programs"] == 32
    (entry,) = (e for e in KNOWN[name] if e.kernel == "split")
    assert entry.in_flight > 26 and entry.outstanding > 0


def test_the_loss_of_an_odd_vocabulary():
    """Rows that start anywhere are read 16 bytes at a time, with few exponentials."""
    whole, _ = (e for e in KNOWN["sm_90 cross_entropy bf16 V=50257"] if e.kernel == "loss")
    assert whole.issue <= 13 and whole.exponentials <= 1.2


@pytest.mark.parametrize(
    "name", [PLAIN, f"{PLAIN}, Gluon", "sm_90 decode bf16 D=128 one query, lengths"]
)
def test_machine_code_is_read_as_before(compiled, name):
    """Every figure of a case in the ledger follows from what is compiled: units, products, copies
    under way, bytes, and, in Gluon, warps that are specialised.
    """
    table = cases.Table.read()
    if table.triton != version("triton"):
        pytest.skip(f"the data are of Triton {table.triton}")
    assert cost.rows(cost.ledger(name, compiled(name))) == table.cases[name]["costs"]


ATTENTION = ("forward", "backward_dkdv", "backward_dq")


def slots(name, part, kernel):
    """Return the issue slots of a loop in the ledger, for a tile of 128 x 64 scores."""
    known = KNOWN[f"sm_90 attention bf16 {name}"]
    (entry,) = (e for e in known if (e.kernel, e.part) == (kernel, part))
    return entry.issue


@pytest.mark.parametrize("mask", ["key mask", "2-D mask"])
@pytest.mark.parametrize("dropout", ["", ", dropout"])
@pytest.mark.parametrize("d", [64, 128])
def test_inside_of_a_mask_a_loop_costs_what_it_does_without_one(d, dropout, mask):
    for kernel in ATTENTION:
        inside = slots(f"D={d} {mask}{dropout}", "full", kernel)
        assert inside <= 1.03 * slots(f"D={d} plain{dropout}", "full", kernel)


def test_no_loop_of_the_data_misuses_registers():
    """Those for Hopper run the exponentials of whole tiles beside products."""
    assert cost.misused_registers(e for entries in KNOWN.values() for e in entries) == []


def test_the_tables_of_the_page_are_those_of_the_data():
    """Else `python -m benchmarks.proof.cost --docs`."""
    page = cost.PAGE.read_text()
    assert cost.with_tables(page) == page


def test_the_cost_of_batch_invariance_on_its_page():
    """docs/batch_invariance.md has the figures of the ledger."""
    entries = cost.read(cases.Table.read())
    name = "sm_90 decode bf16 D=128 one query, lengths"
    usual = next(e for e in entries[name] if e.kernel == "split")
    ours = entries[f"{name}, batch-invariant"][0]  # the loop of whole tiles
    loops = [e for e in entries["sm_90 product bf16 D=1024"] if e.part == "loop"]
    page = (ROOT / "docs" / "batch_invariance.md").read_text()
    for pair in (
        (f"{usual.issue:.0f}", f"{ours.issue:.0f}"),
        (f"{usual.products:g}", f"{ours.products:g}"),
        (f"{usual.moved:,.0f}", f"{ours.moved:,.0f}"),
        (f"{usual.in_flight:.0f}", f"{ours.in_flight:.1f}"),
    ):
        assert " | ".join(["", *pair, ""]).strip() in page
    slots = [128 * 128 / 128 * e.issue for e in loops]  # of a tile of 128 x 128, and 64 features
    assert f"takes {slots[0]:.0f} issue slots" in page and f"and {slots[1]:.0f} where" in page
