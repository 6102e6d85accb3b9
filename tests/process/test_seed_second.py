"""All that the second seed document names, under `dtorch.distributed.tensor` and `dtorch.distributed.device_mesh`."""

from __future__ import annotations

import pytest
import torch

import dtorch
from dtorch import Placement
from dtorch.distributed.device_mesh import DeviceMesh, init_device_mesh
from dtorch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    empty,
    full,
    ones,
    rand,
    randn,
    zeros,
)


@pytest.fixture
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (4,), mesh_dim_names=("x",))


def test_distribute_tensor_places_and_redistributes(mesh: DeviceMesh) -> None:
    value = torch.arange(10.0).view(5, 2)
    placed = distribute_tensor(value, mesh, [Shard(0)])
    assert isinstance(placed, DTensor)
    assert [placed.to_local(rank).tolist() for rank in range(4)] == [
        [[0.0, 1.0], [2.0, 3.0]],
        [[4.0, 5.0], [6.0, 7.0]],
        [[8.0, 9.0]],
        [],
    ]
    moved = distribute_tensor(placed, mesh, [Replicate()])
    assert moved.placements == [Replicate()]
    assert torch.equal(moved.to_local(), value)


def test_distribute_module_partitions_and_wraps(mesh: DeviceMesh) -> None:
    def partition(name: str, module: dtorch.nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            placed = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            module.register_parameter(key, dtorch.nn.Parameter(placed))

    def enter(module, inputs, mesh):
        return distribute_tensor(inputs[0], mesh, [Replicate()])

    def leave(module, outputs, mesh):
        return outputs.redistribute(placements=[Replicate()])

    plain = torch.nn.Linear(6, 8)
    x = torch.randn(3, 6)
    expected = plain(x)
    module = distribute_module(plain, mesh, partition, enter, leave)
    assert module.weight.placements == [Shard(0)]
    y = module(x)
    assert y.placements == [Replicate()]
    torch.testing.assert_close(y.to_torch(), expected)


def test_distribute_module_replicates_what_it_is_not_told(mesh: DeviceMesh) -> None:
    module = distribute_module(torch.nn.Linear(2, 2), mesh)
    assert module.weight.placements == [Replicate()]
    assert module.bias.device_mesh == mesh


def test_from_local_takes_one_tensor_per_rank(mesh: DeviceMesh) -> None:
    pieces = [torch.full((2, 3), float(rank)) for rank in range(4)]
    t = DTensor.from_local(pieces, mesh, [Shard(0)])
    assert tuple(t.shape) == (8, 3)
    assert torch.equal(t.to_torch(), torch.cat(pieces))


def test_from_local_takes_a_function_of_the_rank(mesh: DeviceMesh) -> None:
    t = DTensor.from_local(lambda rank: torch.full((1, 2), float(rank)), mesh, [Shard(0)], shape=(4, 2))
    assert t.tolist() == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]


def test_from_local_checks_the_pieces(mesh: DeviceMesh) -> None:
    uneven = [torch.ones(n, 2) for n in (2, 2, 1, 0)]
    t = DTensor.from_local(uneven, mesh, [Shard(0)], run_check=True, shape=torch.Size((5, 2)), stride=(2, 1))
    assert torch.equal(t.to_torch(), torch.ones(5, 2))
    with pytest.raises(ValueError, match="must hold"):
        DTensor.from_local([torch.ones(2, 2)] * 4, mesh, [Shard(0)], run_check=True, shape=(5, 2), stride=(2, 1))


def test_from_local_sums_partial_pieces(mesh: DeviceMesh) -> None:
    pieces = [torch.tensor([float(rank), 1.0]) for rank in range(4)]
    for op, value in [("sum", [6.0, 4.0]), ("avg", [1.5, 1.0]), ("max", [3.0, 1.0]), ("min", [0.0, 1.0])]:
        t = DTensor.from_local(pieces, mesh, [Partial(op)])
        assert t.placements == [Partial(op)]
        assert t.full_tensor().tolist() == value, op


@pytest.mark.parametrize("factory", [zeros, ones, empty, rand, randn])
def test_factories_take_the_usual_arguments_and_a_mesh(factory, mesh: DeviceMesh) -> None:
    t = factory(
        8, 2, dtype=torch.float64, layout=torch.strided, requires_grad=True, device_mesh=mesh, placements=[Shard(0)]
    )
    assert (tuple(t.shape), t.dtype, t.requires_grad) == ((8, 2), torch.float64, True)
    assert (t.device_mesh, t.placements) == (mesh, [Shard(0)])


def test_full_takes_a_fill_value(mesh: DeviceMesh) -> None:
    assert full((2, 2), 7, dtype=torch.int64, device_mesh=mesh, placements=[Shard(1)]).tolist() == [[7, 7], [7, 7]]


def test_eight_elements_over_four_ranks_are_two_each(mesh: DeviceMesh) -> None:
    local = ones(8, device_mesh=mesh, placements=[Shard(0)])
    assert [local.to_local(rank).tolist() for rank in range(4)] == [[1.0, 1.0]] * 4

    copies = ones(8, device_mesh=mesh, placements=[Replicate()])
    assert [copies.to_local(rank).tolist() for rank in range(4)] == [[1.0] * 8] * 4


def test_to_local_needs_a_rank_where_ranks_differ(mesh: DeviceMesh) -> None:
    assert ones(4, device_mesh=mesh, placements=[Replicate()]).to_local().tolist() == [1.0] * 4
    with pytest.raises(ValueError, match="rank"):
        ones(4, device_mesh=mesh, placements=[Shard(0)]).to_local()


def test_redistribute_converts_between_placements_possibly_asynchronously(mesh: DeviceMesh) -> None:
    t = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
    for target in ([Replicate()], [Shard(1)], [Shard(0)]):
        moved = t.redistribute(placements=target, async_op=True)
        assert moved.placements == target
        assert moved.full_tensor().tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]


def test_metadata_follows_a_plain_tensor(mesh: DeviceMesh) -> None:
    t = zeros(8, 2, device_mesh=mesh, placements=[Shard(0)])
    assert (tuple(t.shape), tuple(t.size()), t.size(0)) == ((8, 2), (8, 2), 8)
    assert (t.stride(), t.ndim, t.numel(), t.dtype) == ((2, 1), 2, 16, torch.float32)
    assert t.device.type == "cpu"
    assert (t.device_mesh, t.placements) == (mesh, (Shard(0),))


@pytest.mark.parametrize(
    "placements", [[Shard(0), Partial()], [Shard(1), Shard(0)], [Partial("max"), Replicate()]], ids=str
)
def test_from_local_keeps_the_pieces_of_every_rank(placements: list[Placement]) -> None:
    mesh = dtorch.init_device_mesh("cpu", (2, 2))
    like = dtorch.distribute_tensor(torch.zeros(5, 3), mesh, placements)
    pieces = [torch.randn(like.to_local(r).shape[::-1]).T for r in range(4)]  # not contiguous
    if placements[1] == Replicate():
        pieces[1], pieces[3] = pieces[0], pieces[2]
    t = dtorch.from_local(pieces, mesh, placements, shape=(5, 3))
    for rank, piece in enumerate(pieces):
        assert torch.equal(t.to_local(rank), piece)


def test_from_local_takes_pieces_larger_than_a_command_may_be() -> None:
    mesh = dtorch.init_device_mesh("cpu", (2,))
    pieces = [torch.full((9_000_000,), float(r + 1)) for r in range(2)]
    assert dtorch.from_local(pieces, mesh, [Partial()]).sum().item() == 27_000_000
