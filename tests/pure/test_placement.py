"""Placements: small values, equal to torch's, and resolved against a mesh and a tensor."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch.distributed.tensor as theirs
from hypothesis import given
from hypothesis import strategies as st

from dtorch.placement import Partial, Placement, Replicate, Shard, as_placement, as_placements

EACH = [Shard(0), Shard(1), Shard(-1), Replicate(), Partial(), Partial("avg"), Partial("max"), Partial("min")]
TORCHS = [
    theirs.Shard(0),
    theirs.Shard(1),
    theirs.Shard(-1),
    theirs.Replicate(),
    theirs.Partial(),
    theirs.Partial("avg"),
    theirs.Partial("max"),
    theirs.Partial("min"),
]


def test_equality_is_by_value_and_agrees_with_torchs_and_hashes() -> None:
    for i, ours in enumerate(EACH):
        for j, other in enumerate([*EACH, *TORCHS]):
            same = i == j % len(EACH)
            assert (ours == other) is same
            assert (other == ours) is same
            assert not same or hash(ours) == hash(other)
        assert ours != "Shard(0)"


def test_repr_reads_as_code() -> None:
    for placement in EACH:
        assert eval(repr(placement)) == placement
    assert repr(Partial()) == "Partial()"
    assert repr(Partial("max")) == "Partial('max')"


def test_questions() -> None:
    assert Shard(1).is_shard()
    assert Shard(1).is_shard(1)
    assert not Shard(1).is_shard(0)
    assert Replicate().is_replicate()
    assert Partial().is_partial()
    assert Partial("max").is_partial("max")
    assert not Partial("max").is_partial("sum")
    assert not Replicate().is_shard()
    assert not Shard(0).is_replicate()


def test_copies_and_pickles() -> None:
    for placement in EACH:
        for again in (copy.copy(placement), copy.deepcopy(placement), pickle.loads(pickle.dumps(placement))):
            assert type(again) is type(placement)
            assert again == placement


def test_placements_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Shard(0).dim = 1  # type: ignore[misc]


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="must be one of sum, avg, max, min"):
        Partial("product")
    for dim in ("0", 0.0, True, None):
        with pytest.raises(TypeError, match="dim is the index of a tensor dim"):
            Shard(dim)  # type: ignore[arg-type]


def test_torchs_are_converted() -> None:
    for ours, torchs in zip(EACH, TORCHS, strict=True):
        converted = as_placement(torchs)
        assert type(converted) is type(ours)
        assert isinstance(converted, Placement)
    assert as_placement(EACH[0]) is EACH[0]
    for wrong in ("Shard(0)", 0, None, theirs.Partial("product")):
        with pytest.raises(TypeError, match="is not a placement: write Shard"):
            as_placement(wrong)


def test_none_is_replicate_and_one_placement_is_a_list_of_one() -> None:
    assert as_placements(None, 3, 2) == (Replicate(),) * 3
    assert as_placements(Shard(0), 1, 2) == (Shard(0),)
    assert as_placements(theirs.Shard(0), 1, 2) == (Shard(0),)  # pyright: ignore[reportArgumentType]


@given(st.integers(1, 5), st.data())
def test_dims_are_counted_from_the_front(ndim: int, data: st.DataObject) -> None:
    dim = data.draw(st.integers(-ndim, ndim - 1))
    (resolved,) = as_placements([Shard(dim)], 1, ndim)
    assert isinstance(resolved, Shard)
    assert resolved.dim == range(ndim)[dim]
    assert as_placements((resolved,), 1, ndim) == (resolved,)


@pytest.mark.parametrize(
    ("placements", "mesh_ndim", "tensor_ndim", "message"),
    [
        ([Shard(0)], 2, 1, "1 given for a mesh of 2 dims; give one placement per mesh dim"),
        ([Shard(2)], 1, 2, r"Shard\(2\) is out of range for a tensor of 2 dims; legal dims are -2 to 1"),
        ([Shard(-3)], 1, 2, r"Shard\(-3\) is out of range"),
        ([Shard(0)], 1, 0, "a tensor of 0 dims cannot be sharded"),
        ([Partial("max"), Partial("min")], 2, 1, "must be of one kind, or sum with avg"),
        ([Partial("max"), Partial()], 2, 1, "must be of one kind, or sum with avg"),
    ],
)
def test_refused(placements: list[Placement], mesh_ndim: int, tensor_ndim: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_placements(placements, mesh_ndim, tensor_ndim)


def test_sums_commute_with_averages() -> None:
    both = (Partial("avg"), Partial("sum"))
    assert as_placements(both, 2, 0) == both
