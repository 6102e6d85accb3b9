"""Every snippet of the first seed document, as written, with "cpu" for "cuda" and the imports it leaves out."""

from __future__ import annotations

import asyncio
import re
import textwrap
from pathlib import Path

import pytest
import torch

import dtorch
from dtorch import Tensor
from dtorch.distributed_spec import DeviceMesh, Partial, Replicate, Shard, init_device_mesh

from .scripts import run_script


@pytest.fixture
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=["dp", "tp"])


# 1. The single-device API is PyTorch's.


def test_single_device() -> None:
    a = dtorch.randn(4, 8)
    b = dtorch.matmul(a, a.transpose(0, 1))
    c = (a + a * 2.0).relu().sum()

    value = a.to_torch()
    assert torch.equal(b.to_torch(), value @ value.T)
    assert torch.equal(c.to_torch(), (value + value * 2.0).relu().sum())


def test_types_are_torchs_own() -> None:
    assert dtorch.float32 is torch.float32
    assert dtorch.device is torch.device
    assert dtorch.finfo is torch.finfo
    assert dtorch.iinfo is torch.iinfo


# 2. DTensor: meshes, creation, conversion.


def test_mesh_from_the_constructor() -> None:
    mesh = DeviceMesh("cpu")
    assert (mesh.ndim, mesh.size(), mesh.is_distributed) == (1, 1, False)

    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=["dp", "tp"])
    assert (tuple(mesh.shape), mesh.size("dp"), mesh.size("tp")) == ((2, 2), 2, 2)
    assert mesh == DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]]), mesh_dim_names=["dp", "tp"])


def test_mesh_from_init_device_mesh() -> None:
    mesh = init_device_mesh("cpu", mesh_shape=2, mesh_dim_names=["dp"])
    assert (tuple(mesh.shape), tuple(mesh.mesh_dim_names)) == ((2,), ("dp",))
    mesh = init_device_mesh("cpu", mesh_shape=(2, 2), mesh_dim_names=["dp", "tp"])
    assert (tuple(mesh.shape), tuple(mesh.mesh_dim_names)) == ((2, 2), ("dp", "tp"))


def test_creating_a_dtensor() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=["dp", "tp"])
    dt = dtorch.zeros(4, 128, 256, device_mesh=mesh, placements=[Shard(0), Replicate()])

    assert tuple(dt.shape) == (4, 128, 256)
    assert dt.device_mesh == mesh
    assert dt.placements == [Shard(0), Replicate()]
    assert [tuple(dt.to_local(rank).shape) for rank in range(4)] == [(2, 128, 256)] * 4
    assert torch.equal(dt.to_torch(), torch.zeros(4, 128, 256))


@pytest.mark.parametrize(
    "make",
    [
        lambda **where: dtorch.tensor([[1.0, 2.0], [3.0, 4.0]], **where),
        lambda **where: dtorch.zeros(2, 2, **where),
        lambda **where: dtorch.ones(2, 2, **where),
        lambda **where: dtorch.empty(2, 2, **where),
        lambda **where: dtorch.rand(2, 2, **where),
        lambda **where: dtorch.randn(2, 2, **where),
        lambda **where: dtorch.full((2, 2), 7.0, **where),
        lambda **where: dtorch.arange(4, **where),
        lambda **where: Tensor(torch.ones(2, 2), **where),
    ],
    ids=["tensor", "zeros", "ones", "empty", "rand", "randn", "full", "arange", "Tensor"],
)
def test_everything_that_makes_a_tensor_takes_mesh_and_placements(make, mesh: DeviceMesh) -> None:
    placed = make(device_mesh=mesh, placements=[Shard(0), Replicate()])
    assert placed.device_mesh == mesh
    assert placed.placements == [Shard(0), Replicate()]

    default = make()
    assert default.device_mesh == dtorch.Graph.default_graph().default_device_mesh
    assert default.placements == [Replicate()]


def test_device_and_device_mesh_exclude_each_other(mesh: DeviceMesh) -> None:
    with pytest.raises(ValueError, match="device_mesh"):
        dtorch.zeros(2, device="cpu", device_mesh=mesh)
    assert dtorch.zeros(2, device="cpu").device_mesh == DeviceMesh("cpu")


def test_from_and_to_torch(mesh: DeviceMesh) -> None:
    torch_t = torch.randn(4, 128)
    dt = dtorch.Tensor(torch_t, device_mesh=mesh, placements=[Shard(0), Replicate()])

    local_tensor = dt.to_torch()

    assert type(local_tensor) is torch.Tensor
    assert torch.equal(local_tensor, torch_t)


# 3. Operators take DTensors, and derive mesh and placements.


def test_the_mesh_is_derived() -> None:
    mesh = init_device_mesh("cpu", 2, mesh_dim_names=["dp"])
    a = dtorch.zeros(4, 128, device_mesh=mesh, placements=[Shard(0)])
    b = dtorch.zeros(4, 128, device_mesh=mesh, placements=[Replicate()])

    c = dtorch.add(a, b)

    assert c.device_mesh == mesh
    assert c.placements == [Shard(0)]


def test_meshes_that_differ_are_refused_until_redistributed() -> None:
    left, right = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
    a = dtorch.ones(4, device_mesh=left, placements=[Shard(0)])
    b = dtorch.ones(4, device_mesh=right, placements=[Shard(0)])
    with pytest.raises(dtorch.DeviceMeshError, match="redistribute"):
        dtorch.add(a, b)
    assert (a + b.redistribute(device_mesh=left, placements=[Shard(0)])).tolist() == [2.0] * 4


def test_elementwise_operators_pass_placements_through() -> None:
    mesh = init_device_mesh("cpu", 2, mesh_dim_names=["dp"])
    a = dtorch.zeros(4, 128, device_mesh=mesh, placements=[Shard(0)])
    b = dtorch.relu(a)
    c = dtorch.add(a, a)
    assert b.placements == [Shard(0)]
    assert c.placements == [Shard(0)]


def test_softmax_keeps_the_placements_of_the_other_dims() -> None:
    mesh_2d = init_device_mesh("cpu", (2, 2), mesh_dim_names=["dp", "tp"])
    a = dtorch.zeros(4, 128, device_mesh=mesh_2d, placements=[Shard(0), Replicate()])
    b = dtorch.nn.functional.softmax(a, dim=-1)
    assert b.placements == [Shard(0), Replicate()]
    assert torch.equal(b.to_torch(), torch.full((4, 128), 1 / 128))


def test_illegal_placements_name_operator_placements_and_what_is_legal() -> None:
    mesh = init_device_mesh("cpu", 2, mesh_dim_names=["dp"])
    a = dtorch.randn(4, 128, device_mesh=mesh, placements=[Shard(1)])
    with pytest.raises(dtorch.PlacementError) as raised:
        dtorch.nn.functional.softmax(a, dim=-1)
    message = str(raised.value)
    assert "softmax" in message
    assert "[Shard(1)]" in message
    assert "[Replicate()]" in message and "[Shard(0)]" in message
    assert "redistribute(placements=" in message

    legal = dtorch.nn.functional.softmax(a.redistribute(placements=[Shard(0)]), dim=-1)
    assert legal.placements == [Shard(0)]
    torch.testing.assert_close(legal.to_torch(), torch.softmax(a.to_torch(), dim=-1))


# 4. redistribute


def test_redistribute_to_another_mesh_and_placements() -> None:
    tensor = dtorch.arange(12, device_mesh=init_device_mesh("cpu", 2), placements=[Shard(0)])
    new_device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=["dp", "tp"])

    new_tensor = tensor.redistribute(device_mesh=new_device_mesh, placements=[Shard(0), Replicate()])

    assert new_tensor.device_mesh == new_device_mesh
    assert new_tensor.placements == [Shard(0), Replicate()]
    assert new_tensor.to_local(3).tolist() == [6, 7, 8, 9, 10, 11]
    assert new_tensor.tolist() == list(range(12))


def test_redistribute_like(mesh: DeviceMesh) -> None:
    tensor = dtorch.arange(8, device_mesh=mesh, placements=[Replicate(), Shard(0)])
    target_tensor = dtorch.zeros(2, device_mesh=mesh, placements=[Shard(0), Replicate()])

    new_tensor = tensor.redistribute_like(target_tensor)

    assert (new_tensor.device_mesh, new_tensor.placements) == (mesh, [Shard(0), Replicate()])
    assert new_tensor.tolist() == list(range(8))


def test_redistribute_by_dict(mesh: DeviceMesh) -> None:
    tensor = dtorch.arange(8, device_mesh=mesh, placements=[Replicate(), Shard(0)])

    new_tensor = tensor.redistribute_by_dict(
        device_mesh=mesh,
        placements_dict={
            "dp": Shard(0),
            "tp": Replicate(),
        },
        default_placement_mode="keep",
    )
    assert new_tensor.placements == [Shard(0), Replicate()]
    assert new_tensor.tolist() == list(range(8))

    some = {"placements_dict": {"dp": Shard(0)}}
    keep = tensor.redistribute_by_dict(**some, default_placement_mode="keep")
    assert keep.placements == [Shard(0), Shard(0)]
    replicate = tensor.redistribute_by_dict(**some, default_placement_mode="replicate")
    assert replicate.placements == [Shard(0), Replicate()]
    with pytest.raises(ValueError, match="tp"):
        tensor.redistribute_by_dict(**some, default_placement_mode="raise_error")


def test_a_partial_sum_is_reduced(mesh: DeviceMesh) -> None:
    a = dtorch.ones(2, 8, device_mesh=mesh, placements=[Replicate(), Shard(1)])
    b = dtorch.ones(8, 3, device_mesh=mesh, placements=[Replicate(), Shard(0)])
    c = a @ b
    assert c.placements == [Replicate(), Partial()]
    assert c.redistribute(placements=[Replicate(), Replicate()]).to_local().tolist() == [[8.0] * 3] * 2


# 5. Values without blocking.


def test_to_torch_async() -> None:
    a = dtorch.rand(1000, 1000)
    b = dtorch.rand(1000, 1000)
    c = dtorch.matmul(a, b)

    future = c.to_torch_async()
    result = future.get()

    assert type(result) is torch.Tensor
    torch.testing.assert_close(result, a.to_torch() @ b.to_torch())


def test_awaiting_a_future() -> None:
    async def async_get(tensor):
        future = tensor.to_torch_async()
        result = await future
        return result

    dtorch_x = dtorch.Tensor(torch.ones(2, 3))
    result = asyncio.run(async_get(dtorch_x))
    assert torch.equal(result, torch.ones(2, 3))


# 6. Simulation.

SIMULATED = """
    import dtorch
    from dtorch import Replicate, Shard, init_device_mesh
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=["dp", "tp"])
    dtorch.manual_seed(0)
    a = dtorch.randn(4, 8, device_mesh=mesh, placements=[Shard(0), Shard(1)])
    b = dtorch.randn(8, 3, device_mesh=mesh, placements=[Replicate(), Shard(0)])
    c = a @ b
    print(c.placements, c.to_torch().double().sum().item())
    try:
        dtorch.zeros(9, device_mesh=init_device_mesh("cpu", 9), placements=[Shard(0)])
        print("9 devices")
    except dtorch.DtorchError as e:
        print(e)
"""


def test_one_device_simulates_a_cluster(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(SIMULATED))
    variable = "DTORCH_NUM_GPU_WHEN_ENABLE_DTENSOR_IN_SAME_DEVICE"

    real = run_script(tmp_path / "script.py")
    eight = run_script(tmp_path / "script.py", DTORCH_DTENSOR_IN_SAME_DEVICE="1")
    sixteen = run_script(tmp_path / "script.py", DTORCH_DTENSOR_IN_SAME_DEVICE="true", **{variable: "16"})

    value = real.splitlines()[0]
    assert re.match(r"\(?\[?Shard\(0\), Partial\(", value), value
    assert [real.splitlines()[1], sixteen.splitlines()[1]] == ["9 devices"] * 2
    assert variable in eight.splitlines()[1]
    assert [eight.splitlines()[0], sixteen.splitlines()[0]] == [value] * 2
