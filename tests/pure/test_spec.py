"""Specs: which part of a tensor each rank holds, held against torch.chunk."""

from __future__ import annotations

import copy
import itertools
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtorch.mesh import DeviceMesh, init_device_mesh
from dtorch.placement import Partial, Placement, Replicate, Shard
from dtorch.spec import TensorSpec, chunk_sizes, contiguous_stride, cut, cuts, resolve


def chunks(t: torch.Tensor, n: int, dim: int) -> list[torch.Tensor]:
    """torch.chunk, with empty pieces for the ranks that it leaves without."""
    pieces = list(torch.chunk(t, n, dim))
    return pieces + [t.narrow(dim, 0, 0)] * (n - len(pieces))


def piece(t: torch.Tensor, spec: TensorSpec, rank: int) -> torch.Tensor:
    """What `rank` holds of `t`, by nested chunks in mesh order."""
    for p, n, c in zip(spec.placements, spec.mesh.shape, spec.mesh.coordinates[rank], strict=True):
        if isinstance(p, Shard):
            t = chunks(t, n, p.dim)[c]
    return t


@st.composite
def specs(draw: st.DrawFn, *, partial: bool = True) -> TensorSpec:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    mesh = init_device_mesh("cpu", draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    kinds: list[Placement] = [Replicate(), *(Shard(d) for d in range(len(shape)))]
    if partial:
        kinds.append(Partial())
    placements = tuple(draw(st.sampled_from(kinds)) for _ in mesh.shape)
    order = draw(st.permutations(range(len(shape))))
    stride = [0] * len(shape)
    for d, step in zip(order, contiguous_stride(tuple(shape[d] for d in order)), strict=True):
        stride[d] = step
    return TensorSpec.of(shape, tuple(stride), torch.float32, mesh, placements)


def values(spec: TensorSpec) -> torch.Tensor:
    flat = torch.arange(spec.numel, dtype=spec.dtype)
    return torch.empty_strided(spec.shape, spec.stride).copy_(flat.reshape(spec.shape))


@given(st.integers(0, 40), st.integers(1, 9))
def test_cuts_are_torch_chunk(size: int, n: int) -> None:
    expected = [len(c) for c in chunks(torch.arange(size), n, 0)]
    assert list(chunk_sizes(size, n)) == expected
    assert [cut(size, n, i)[1] for i in range(n)] == expected
    assert [cut(size, n, i)[0] for i in range(n)] == list(itertools.accumulate([0, *expected[:-1]]))
    assert cuts(size, (n,)) == expected


def test_uneven_pieces() -> None:
    assert chunk_sizes(5, 2) == (3, 2)
    assert chunk_sizes(3, 4) == (1, 1, 1, 0)
    assert cuts(5, (2, 2)) == [2, 1, 1, 1]
    assert cuts(0, (2,)) == [0, 0]


@given(st.integers(0, 60), st.lists(st.integers(1, 5), max_size=3))
def test_nested_cuts_add_up(size: int, ns: list[int]) -> None:
    pieces = cuts(size, tuple(ns))
    assert len(pieces) == math.prod(ns)
    assert sum(pieces) == size


@given(specs())
def test_each_rank_holds_what_nested_chunks_give_it(spec: TensorSpec) -> None:
    whole = values(spec)
    for rank in range(spec.mesh.nranks):
        expected = piece(whole, spec, rank)
        index = tuple(slice(start, start + length) for start, length in spec.region(rank))
        assert spec.local_shape(rank) == tuple(expected.shape)
        assert spec.local_offset(rank) == tuple(start for start, _ in spec.region(rank))
        assert torch.equal(whole[index], expected)


@given(specs(partial=False))
def test_regions_tile_the_tensor(spec: TensorSpec) -> None:
    """Every element lies on as many ranks as the Replicate dims have, and on no more."""
    count = torch.zeros(spec.shape, dtype=torch.int64)
    for rank in range(spec.mesh.nranks):
        count[tuple(slice(start, start + length) for start, length in spec.region(rank))] += 1
    copies = math.prod(n for p, n in zip(spec.placements, spec.mesh.shape, strict=True) if p == Replicate())
    assert torch.equal(count, torch.full(spec.shape, copies))


@given(specs())
def test_regions_stay_inside_the_tensor(spec: TensorSpec) -> None:
    for rank in range(spec.mesh.nranks):
        for (start, length), size in zip(spec.region(rank), spec.shape, strict=True):
            assert 0 <= start <= start + length <= size


@given(specs())
def test_local_strides_pack_the_piece_in_the_order_of_the_whole(spec: TensorSpec) -> None:
    whole = values(spec)
    for rank in range(spec.mesh.nranks):
        stride, expected = spec.local_stride(rank), piece(whole, spec, rank)
        assert stride is not None
        if expected.numel() == 0:
            continue
        packed = expected.contiguous() if spec.is_contiguous else expected.clone(memory_format=torch.preserve_format)
        assert torch.empty_strided(expected.shape, stride).copy_(expected).equal(expected)
        assert 1 + sum((n - 1) * s for n, s in zip(expected.shape, stride, strict=True)) == expected.numel()
        # Where torch keeps the order of the whole, so do we; dims of size 1 may have any stride.
        if spec.is_contiguous or whole.shape == expected.shape:
            for n, ours, torchs in zip(expected.shape, stride, packed.stride(), strict=True):
                assert n == 1 or ours == torchs


@pytest.mark.parametrize("stride", [(0, 1), (16, 2), (1, 1)])
def test_a_tensor_with_holes_or_overlap_has_no_local_stride(stride: tuple[int, int]) -> None:
    spec = TensorSpec.of((4, 8), stride, torch.float32, DeviceMesh("cpu", range(2)), (Shard(0),))
    assert spec.local_stride(0) is None


@given(st.lists(st.integers(0, 5), max_size=4))
def test_contiguous_stride_is_torchs(shape: list[int]) -> None:
    assert contiguous_stride(tuple(shape)) == torch.empty(shape).stride()


@given(specs())
def test_equal_specs_are_one_object(spec: TensorSpec) -> None:
    assert TensorSpec.of(spec.shape, spec.stride, spec.dtype, spec.mesh, spec.placements) is spec
    assert copy.deepcopy(spec) is copy.copy(spec) is spec
    assert pickle.loads(pickle.dumps(spec)) is spec
    assert spec.with_placements(spec.placements) is spec


def test_specs_differ_by_each_field() -> None:
    mesh = DeviceMesh("cpu", range(2))
    base = TensorSpec.of((2, 1), None, torch.float32, mesh, (Replicate(),))
    others = [
        TensorSpec.of((1, 2), None, torch.float32, mesh, (Replicate(),)),
        TensorSpec.of((2, 1), (1, 2), torch.float32, mesh, (Replicate(),)),
        TensorSpec.of((2, 1), None, torch.float64, mesh, (Replicate(),)),
        TensorSpec.of((2, 1), None, torch.float32, DeviceMesh("cpu", [1, 0]), (Replicate(),)),
        TensorSpec.of((2, 1), None, torch.float32, mesh, (Partial(),)),
        TensorSpec.of((2, 1), None, torch.float32, mesh, (Shard(0),)),
    ]
    assert len({base, *others}) == 7


def test_questions_and_words() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=["dp", "tp"])
    spec = TensorSpec.of((4, 128), None, torch.float32, mesh, (Shard(1), Partial()))
    assert (spec.ndim, spec.numel) == (2, 512)
    assert (spec.is_partial, spec.is_replicated, spec.is_contiguous) == (True, False, True)
    assert spec.describe() == "float32[4, 128] [Shard(1), Partial()]"
    assert repr(spec) == "TensorSpec(float32[4, 128] [Shard(1), Partial()] on cpu(dp=2, tp=2))"


# Where a tensor asked for on a mesh, or on a slice of one, lies.


def test_resolve_on_a_mesh_of_its_own() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=["dp", "tp"])
    assert resolve(mesh, None, 2) == (mesh, (Replicate(), Replicate()))
    assert resolve(mesh, [Shard(-1), Replicate()], 2) == (mesh, (Shard(1), Replicate()))
    with pytest.raises(ValueError, match="one placement per mesh dim"):
        resolve(mesh, [Shard(0)], 2)


def test_resolve_on_a_slice() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=["dp", "tp"])
    assert resolve(mesh["tp"], [Shard(-1)], 2) == (mesh, (Replicate(), Shard(1)))
    assert resolve(mesh["tp", "dp"], [Shard(0), Shard(1)], 2) == (mesh, (Shard(1), Shard(0)))
    kept = TensorSpec.of((4, 4), None, torch.float32, mesh, (Shard(0), Partial()))
    assert resolve(mesh["tp"], [Replicate()], 2, keep=kept) == (mesh, (Shard(0), Replicate()))
    elsewhere = kept.with_placements((Shard(0),), DeviceMesh("cpu", range(4)))
    assert resolve(mesh["tp"], [Shard(1)], 2, keep=elsewhere) == (mesh, (Replicate(), Shard(1)))
    with pytest.raises(ValueError, match="2 given for a mesh of 1 dims"):
        resolve(mesh["tp"], [Shard(0), Replicate()], 2)
