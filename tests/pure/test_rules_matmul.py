"""Matrix products against torch on the whole."""

from __future__ import annotations

import pytest
import torch

from dtorch.errors import PlacementError
from dtorch.sharding.propagate import Plan, propagate
from dtorch.sharding.rule import signature

from .discovery import discover
from .harness import WIDE, P, R, S, Sample, capture, check_all, make_call, sweep

aten = torch.ops.aten
OPS = frozenset("mm bmm mv dot vdot outer ger addmm baddbmm addmv addbmm addr matmul linalg.multi_dot einsum".split())
STEMS = frozenset("mm bmm mv dot vdot addmm baddbmm addmv addbmm addr".split())


def rn(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    g = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)


HAND = [
    Sample(aten.mm.default, (rn(5, 3), rn(3, 4))),
    Sample(aten.bmm.default, (rn(3, 5, 2), rn(3, 2, 4))),
    Sample(aten.mv.default, (rn(5, 3), rn(3))),
    Sample(aten.dot.default, (rn(5), rn(5))),
    Sample(aten.vdot.default, (rn(5, dtype=torch.complex128), rn(5, dtype=torch.complex128))),
    Sample(aten.outer.default, (rn(5), rn(3))),
    Sample(aten.ger.default, (rn(5), rn(3))),
    Sample(aten.addmm.default, (rn(4), rn(5, 3), rn(3, 4))),
    Sample(aten.addmm.default, (rn(5, 1), rn(5, 3), rn(3, 4)), {"beta": 0.5, "alpha": -2.0}),
    Sample(aten.addmm.default, (rn(), rn(5, 3), rn(3, 4))),
    Sample(aten.addmm_.default, (rn(5, 4), rn(5, 3), rn(3, 4))),
    Sample(aten.baddbmm.default, (rn(5, 4), rn(3, 5, 2), rn(3, 2, 4))),
    Sample(aten.addmv.default, (rn(5), rn(5, 3), rn(3))),
    Sample(aten.addbmm.default, (rn(5, 4), rn(3, 5, 2), rn(3, 2, 4))),
    Sample(aten.addr.default, (rn(5, 4), rn(5), rn(4))),
    Sample(aten.linear.default, (rn(2, 5, 3), rn(4, 3), rn(4))),
    Sample(aten.linear.default, (rn(5, 3), rn(4, 3))),
    Sample(aten.matmul.default, (rn(2, 1, 5, 3), rn(4, 3, 2))),
    Sample(aten.matmul.default, (rn(3), rn(4, 3, 2))),
    Sample(aten.matmul.default, (rn(4, 5, 3), rn(3))),
    Sample(aten.mm.default, (rn(5, 3, dtype=torch.int64), rn(3, 4, dtype=torch.int64))),
]


@pytest.mark.parametrize("sample", HAND, ids=str)
def test_every_combination_that_is_legal_is_right(sample: Sample) -> None:
    for n in (2, 3, 4) if WIDE else (2, 3):
        legal, wrong = check_all(sample, n, kinds=("sum", "avg", "max"), cap=250 if WIDE else 50)
        assert not wrong, wrong[:3]
        assert legal >= (4 if WIDE else 1)
    report = sweep([sample], cap=30 if WIDE else 6)
    assert not report.wrong, report


def test_op_db_samples_combine() -> None:
    samples = capture(
        lambda f: signature(f).stem in STEMS and not signature(f).has_out,
        ops=lambda name: name in OPS,
        cap=15 if WIDE else 3,
        per_op=20 if WIDE else 3,
    )
    report = sweep(samples, cap=40 if WIDE else 4, variants=2)
    assert not report.wrong, report
    assert sum(report.checked.values()) > 200


def test_nothing_that_combines_is_missing() -> None:
    """Discovery, on distinct dims of at least 3 so that coincidences do not look like rules."""
    samples = [
        Sample(aten.mm.default, (rn(5, 3), rn(3, 4))),
        Sample(aten.bmm.default, (rn(4, 5, 3), rn(4, 3, 6))),
        Sample(aten.addmm.default, (rn(4), rn(5, 3), rn(3, 4))),
    ]
    found = discover({str(s.func): [s] for s in samples})
    assert not found.missing
    assert found.allowed == found.possible


def test_an_average_of_integers_is_rounded_first() -> None:
    """avg([1], [2]) is 1, twice which is 2; but of [2] and [4] it is 3."""
    for func, args in ((aten.dot.default, (rn(4), rn(4))), (aten.mm.default, (rn(3, 4), rn(4, 5)))):
        whole = tuple(t.mul(9).long() for t in args)
        for have in ([(P("avg"),), (R,)], [(R,), (P("avg"),)]):
            propagate(make_call(Sample(func, args), (2,), have))
            with pytest.raises(PlacementError):
                propagate(make_call(Sample(func, whole), (2,), have))
            propagate(make_call(Sample(func, whole), (2,), [tuple(P() if p != R else R for p in ps) for ps in have]))


def test_tensor_parallel_pair_needs_one_reduction() -> None:
    """Columns of the first weight, rows of the second: only the last product is Partial."""
    first = propagate(make_call(Sample(aten.mm.default, (rn(5, 4), rn(4, 8))), (2,), [(R,), (S(1),)]))
    second = propagate(make_call(Sample(aten.mm.default, (rn(5, 8), rn(8, 4))), (2,), [(S(1),), (S(0),)]))
    assert isinstance(first, Plan)
    assert isinstance(second, Plan)
    assert (first.outs[0].placements, second.outs[0].placements) == ((S(1),), (P(),))  # type: ignore[union-attr]
    assert (first.moves, first.frees, second.moves, second.frees) == ((), (), (), ())
