"""Views and rearrangements against torch on the whole."""

from __future__ import annotations

import itertools

import pytest
import torch

from dtorch.errors import PlacementError
from dtorch.sharding import view as view_module
from dtorch.sharding.propagate import Plan, propagate
from dtorch.sharding.rule import _entries, signature

from .harness import MESHES, WIDE, P, R, S, Sample, SimTensor, capture, check, make_call, mesh_of, some, sweep

aten = torch.ops.aten
STEMS = frozenset(stem for stem, entry in _entries.items() if entry.make.__module__ == view_module.__name__)
SOME = frozenset(
    "view reshape permute transpose t unsqueeze squeeze expand diagonal diag_embed unfold flip roll repeat trace "
    "view_as_real view_as_complex nn.functional.pad constant_pad_nd nn.functional.pixel_shuffle flatten tile".split()
)


def rn(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    g = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)


def test_op_db_samples_combine() -> None:
    samples = capture(
        lambda f: signature(f).stem in STEMS and not signature(f).has_out,
        ops=lambda name: WIDE or name in SOME,
        cap=12 if WIDE else 3,
        per_op=20 if WIDE else 3,
    )
    assert len({s.func for s in samples}) >= 15
    report = sweep(samples, cap=40 if WIDE else 3, variants=2)
    assert not report.wrong, report


HAND = [
    Sample(aten.view.default, (rn(6, 4), [24])),
    Sample(aten.view.default, (rn(24), [6, 4])),
    Sample(aten.view.default, (rn(8, 4, 3), [32, 3])),
    Sample(aten.view.default, (rn(32, 3), [8, -1, 3])),
    Sample(aten.view.default, (rn(5, 4), [20])),
    Sample(aten.view.default, (rn(4, 6), [8, 3])),
    Sample(aten.view.default, (rn(3, 12), [3, 4, 3])),
    Sample(aten.view.default, (rn(2, 1, 6), [2, 6, 1])),
    Sample(aten.view.default, (rn(0, 4), [0, 2, 2])),
    Sample(aten.view.default, (rn(1), [])),
    Sample(aten._unsafe_view.default, (rn(8, 4), [2, 4, 4])),
    Sample(aten._reshape_alias.default, (rn(8, 4), [32], [1])),
    Sample(aten.view.dtype, (rn(4, 6), torch.int64)),
    Sample(aten.view.dtype, (rn(4, 6, dtype=torch.float32), torch.int16)),
    Sample(aten.permute.default, (rn(3, 4, 5), [-1, 0, 1])),
    Sample(aten.transpose.int, (rn(3, 4, 5), -1, 0)),
    Sample(aten.unsqueeze.default, (rn(3, 4), -1)),
    Sample(aten.squeeze.default, (rn(2, 1, 3),)),  # a dim that is 1 on one rank only must stay
    Sample(aten.squeeze.dim, (rn(2, 1, 3), 0)),
    Sample(aten.squeeze_.dim, (rn(2, 1, 3), 1)),
    Sample(aten.expand.default, (rn(3, 1), [2, 3, 4])),
    Sample(aten.expand.default, (rn(3, 4), [-1, -1])),
    Sample(aten.diagonal.default, (rn(3, 4, 5), 1, 0, 2)),
    Sample(aten.flip.default, (rn(3, 4), [1])),
    Sample(aten.roll.default, (rn(3, 4), [1], [0])),
    Sample(aten.repeat.default, (rn(3, 4), [2, 1, 3])),
    Sample(aten.constant_pad_nd.default, (rn(3, 4), [1, 2], 5.0)),
    Sample(aten.reflection_pad1d.default, (rn(3, 4), [1, 1])),
]


@pytest.mark.parametrize("sample", HAND, ids=str)
def test_every_placement_on_every_mesh(sample: Sample) -> None:
    x = sample.tensors()[0]
    kinds = [R, *[S(d) for d in range(x.ndim)], P(), P("max"), P("avg")]
    legal = 0
    for shape in MESHES:
        for have in some(itertools.product(kinds, repeat=len(shape))):
            partial = {p for p in have if p.is_partial()}
            if len(shape) > 2 and len(partial) > 1:
                continue
            try:
                check(sample, shape, [tuple(have)])
            except PlacementError:
                continue
            except ValueError:
                continue  # a mix of kinds that no tensor may have
            legal += 1
    assert legal >= 5


def out_of(sample: Sample, shape: tuple[int, ...], *have: object) -> object:
    try:
        plan = propagate(make_call(sample, shape, [tuple(have)]))  # type: ignore[arg-type]
    except PlacementError:
        return None
    assert isinstance(plan, Plan)
    assert plan.outs[0] is not None
    return plan.outs[0].placements


def test_a_view_keeps_shards_that_stay_whole_and_refuses_the_others() -> None:
    flatten = Sample(aten.view.default, (rn(6, 4), [24]))
    assert out_of(flatten, (2,), S(0)) == (S(0),)
    assert out_of(flatten, (2,), S(1)) is None
    assert out_of(Sample(aten.view.default, (rn(5, 4), [20])), (2,), S(0)) is None  # 12 and 8 are not 10 and 10
    assert out_of(Sample(aten.view.default, (rn(24), [6, 4])), (4,), S(0)) is None  # rows would break
    heads = Sample(aten.view.default, (rn(2, 3, 8), [2, 3, 4, 2]))
    assert out_of(heads, (2,), S(2)) == (S(2),)
    assert out_of(heads, (2,), S(0)) == (S(0),)


def test_the_whole_chain_of_cuts_is_checked() -> None:
    # 4 rows over 2 x 2 are 1, 1, 1, 1 and 8 are 2, 2, 2, 2; 6 over 2 x 2 are 2, 1, 2, 1 and 12 are 3, 3, 3, 3.
    assert out_of(Sample(aten.view.default, (rn(4, 2), [8])), (2, 2), S(0), S(0)) == (S(0), S(0))
    assert out_of(Sample(aten.view.default, (rn(6, 2), [12])), (2, 2), S(0), S(0)) is None
    assert out_of(Sample(aten.view.default, (rn(6, 2), [12])), (2, 2), S(0), R) == (S(0), R)


def test_squeeze_drops_globally_single_dims_only() -> None:
    x = SimTensor.distribute(rn(2, 1, 3), mesh_of((2,)), (S(0),))
    assert [tuple(p.shape) for p in aten.squeeze.default(x).pieces] == [(1, 3), (1, 3)]


def test_a_pad_value_counts_once_in_a_sum() -> None:
    plan = propagate(make_call(Sample(aten.constant_pad_nd.default, (rn(3, 4), [1, 1], 5.0)), (2,), [(P(),)]))
    assert isinstance(plan, Plan)
    assert [plan.calls[w].args[2] if w else "value" for w in plan.which] == ["value", 0]


def test_turned_dims_must_be_whole() -> None:
    assert out_of(Sample(aten.flip.default, (rn(4, 4), [0])), (2,), S(0)) is None
    assert out_of(Sample(aten.flip.default, (rn(4, 4), [0])), (2,), S(1)) == (S(1),)
    assert out_of(Sample(aten.flip.default, (rn(4, 4), [])), (2,), S(0)) == (S(0),)
    assert out_of(Sample(aten.roll.default, (rn(4, 4), [1])), (2,), S(0)) is None
