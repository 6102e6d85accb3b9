"""Meshes: values, slices, stages, names, and what is refused with which words."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch

from dtorch.errors import ConfigError, DeviceMeshError
from dtorch.mesh import SIMULATE, SIMULATED_GPUS, DeviceMesh, as_mesh, init_device_mesh


@pytest.fixture
def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 3, 2), mesh_dim_names=["pp", "dp", "tp"])


def test_a_single_device() -> None:
    mesh = DeviceMesh("cpu")
    assert (mesh.ndim, mesh.shape, mesh.ids, mesh.nranks, mesh.size()) == (1, (1,), (0,), 1, 1)
    assert not mesh.is_distributed
    assert DeviceMesh("cpu:3").ids == (3,)
    assert DeviceMesh(torch.device("cpu", 2)).ids == (2,)
    assert DeviceMesh("cpu", 2).shape == (1,)


@pytest.mark.parametrize(
    "ids",
    [
        [[0, 1], [2, 3]],
        ((0, 1), (2, 3)),
        torch.arange(4).reshape(2, 2),
        np.arange(4).reshape(2, 2),
        [range(2), range(2, 4)],
        [torch.tensor([0, 1]), torch.tensor([2, 3])],
    ],
    ids=["lists", "tuples", "tensor", "array", "ranges", "tensors"],
)
def test_ids_may_come_in_any_nesting(ids: object) -> None:
    mesh = DeviceMesh("cpu", ids, mesh_dim_names=["dp", "tp"])
    assert mesh is init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert mesh.shape == (2, 2)
    assert mesh.coordinates == ((0, 0), (0, 1), (1, 0), (1, 1))


def test_an_int_shape_and_a_range_are_one_dim() -> None:
    assert init_device_mesh("cpu", 4) is DeviceMesh("cpu", range(4))
    assert init_device_mesh("cpu", 4, mesh_dim_names="dp").mesh_dim_names == ("dp",)


def test_equal_meshes_are_one_object(grid: DeviceMesh) -> None:
    again = init_device_mesh("cpu", (2, 3, 2), mesh_dim_names=("pp", "dp", "tp"))
    assert again is grid
    assert again == grid
    assert len({grid, again}) == 1
    assert grid != init_device_mesh("cpu", (2, 3, 2))
    assert grid != init_device_mesh("cpu", (2, 3, 2), mesh_dim_names=("pp", "tp", "dp"))
    assert grid != DeviceMesh("cpu", range(12))


def test_threads_get_the_same_object() -> None:
    start, found = threading.Barrier(8), []

    def make() -> None:
        start.wait()
        found.append(DeviceMesh("cpu", [[70, 71], [72, 73]]))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1


def test_copies_and_pickles_are_the_mesh_itself(grid: DeviceMesh) -> None:
    for mesh in (grid, grid["tp"], grid["dp", "tp"], grid.unbind("pp")[1]):
        assert copy.copy(mesh) is mesh
        assert copy.deepcopy({"mesh": mesh})["mesh"] is mesh
        assert pickle.loads(pickle.dumps(mesh)) is mesh


def test_the_mesh_tensor(grid: DeviceMesh) -> None:
    assert torch.equal(grid.mesh, torch.arange(12, dtype=torch.int32).reshape(2, 3, 2))
    grid.mesh.zero_()
    assert grid.mesh.sum() == 66
    assert DeviceMesh("cpu").mesh.tolist() == [0]


def test_sizes_and_coordinates(grid: DeviceMesh) -> None:
    assert (grid.size(), grid.numel(), grid.size(1), grid.size(-1), grid.size("dp")) == (12, 12, 3, 2, 3)
    for rank in range(12):
        assert grid.mesh[grid.get_coordinate(rank)] == rank
    with pytest.raises(DeviceMeshError, match=r"rank 12 is out of range .* 12 ranks"):
        grid.get_coordinate(12)
    with pytest.raises(DeviceMeshError, match="mesh dim 3 is out of range"):
        grid.size(3)


def test_dim_names(grid: DeviceMesh) -> None:
    assert grid.dim_names == grid.mesh_dim_names == ("pp", "dp", "tp")
    assert grid.has_dim_name("dp")
    assert not grid.has_dim_name("ep")
    assert grid.dim_name_index("tp") == 2
    assert grid.check_all_dim_names_in_set({"pp", "dp", "tp", "ep"})
    assert not grid.check_all_dim_names_in_set(["pp", "dp"])
    bare = init_device_mesh("cpu", 2)
    assert (bare.dim_names, bare.mesh_dim_names, bare.has_dim_name("dp")) == ((), None, False)
    assert not bare.check_all_dim_names_in_set({"dp"})
    with pytest.raises(DeviceMeshError, match="no dim named 'ep'; its dims are pp, dp, tp"):
        grid.dim_name_index("ep")
    with pytest.raises(DeviceMeshError, match="its dims have no names"):
        bare.size("dp")


def test_devices(grid: DeviceMesh) -> None:
    assert grid.torch_device == torch.device("cpu")
    assert grid.first_device == torch.device("cpu", 0)
    assert DeviceMesh("cpu:3").torch_device == torch.device("cpu", 3)


def test_repr(grid: DeviceMesh) -> None:
    assert repr(grid) == "DeviceMesh('cpu', (pp=2, dp=3, tp=2))"
    assert repr(DeviceMesh("cpu", [3, 1])) == "DeviceMesh('cpu', (2), ids=[3, 1])"
    assert grid.describe() == "cpu(pp=2, dp=3, tp=2)"
    assert repr(grid["dp", "tp"]) == "DeviceMesh('cpu', (pp=2, dp=3, tp=2))['dp', 'tp']"
    assert grid["tp"].describe() == "cpu(pp=2, dp=3, tp=2)[tp]"
    assert "ids=[1, 2, 3, 4, …, 431, 432]" in repr(DeviceMesh("cpu", range(1, 433)))


# Slices.


def test_a_slice_stands_for_dims_of_its_parent(grid: DeviceMesh) -> None:
    tp = grid["tp"]
    assert isinstance(tp, DeviceMesh)
    assert (tp.parent, tp.parent_dims) == (grid, (2,))
    assert (tp.shape, tp.ndim, tp.size(), tp.mesh_dim_names, tp.device_type) == ((2,), 1, 2, ("tp",), "cpu")
    assert tp is grid["tp"]
    assert tp != grid["dp"]
    assert tp != init_device_mesh("cpu", 2, mesh_dim_names=["tp"])
    assert [tp.get_coordinate(rank) for rank in range(4)] == [(0,), (1,), (0,), (1,)]
    assert grid.parent is None


def test_slices_of_several_dims_keep_the_order_asked_for(grid: DeviceMesh) -> None:
    assert grid["dp", "tp"].parent_dims == (1, 2)
    assert grid["tp", "dp"].parent_dims == (2, 1)
    assert grid["tp", "dp"].shape == (2, 3)
    assert grid["pp", "dp", "tp"] is grid
    assert grid["pp", "tp"]["tp"] is grid["tp"]


def test_slices_name_no_devices(grid: DeviceMesh) -> None:
    for attribute in ("ids", "mesh"):
        with pytest.raises(AttributeError, match=r"names no devices; use \.parent, or \.unbind"):
            getattr(grid["tp"], attribute)
    assert grid["tp"].torch_device == torch.device("cpu")
    assert not hasattr(grid["tp"], "nonsense")


def test_bad_slices(grid: DeviceMesh) -> None:
    with pytest.raises(DeviceMeshError, match="no dim named 'ep'"):
        grid["ep"]
    with pytest.raises(DeviceMeshError, match="a name occurs twice"):
        grid["tp", "tp"]
    with pytest.raises(DeviceMeshError, match="slice a mesh by the names of its dims"):
        grid[0]  # pyright: ignore[reportArgumentType]


# Stages.


def test_unbind_gives_meshes_of_their_own(grid: DeviceMesh) -> None:
    first, second = grid.unbind("pp")
    assert first.parent is None
    assert (first.shape, first.ids, first.mesh_dim_names) == ((3, 2), tuple(range(6)), ("dp", "tp"))
    assert second is DeviceMesh("cpu", [[6, 7], [8, 9], [10, 11]], mesh_dim_names=["dp", "tp"])
    assert [m.ids for m in grid.unbind("dp")] == [(0, 1, 6, 7), (2, 3, 8, 9), (4, 5, 10, 11)]
    for mesh, along in zip(grid.unbind("tp"), grid.mesh.unbind(2), strict=True):
        assert torch.equal(mesh.mesh, along)


def test_unbind_the_only_dim() -> None:
    meshes = init_device_mesh("cpu", 3, mesh_dim_names=["pp"]).unbind()
    assert meshes == (DeviceMesh("cpu:0"), DeviceMesh("cpu:1"), DeviceMesh("cpu:2"))


def test_unbind_a_slice_slices_the_stages(grid: DeviceMesh) -> None:
    stages = grid["pp", "tp"].unbind("pp")
    assert stages == tuple(stage["tp"] for stage in grid.unbind("pp"))
    with pytest.raises(DeviceMeshError, match="has only the dim 'tp'"):
        grid["tp"].unbind()


# Refusals.


@pytest.mark.parametrize(
    ("args", "names", "message"),
    [
        (("cpu", [0, 1, 0]), None, "device id 0 occurs twice"),
        (("cpu", [0, -1]), None, "must not be negative"),
        (("cpu", [[0, 1], [2]]), None, "ragged"),
        (("cpu", [[0, 1], 2]), None, "ragged"),
        (("cpu", []), None, "at least one device"),
        (("cpu", [[], []]), None, "at least one device"),
        (("cpu", "01"), None, "is no device id"),
        (("cpu", [0.0, 1.0]), None, "is no device id"),
        (("cpu", [True, False]), None, "is no device id"),
        (("cpu", [0, 1]), ["dp", "tp"], "2 names for a mesh of 1 dims"),
        (("cpu", [[0, 1]]), ["dp"], "1 names for a mesh of 2 dims"),
        (("cpu", [[0, 1]]), ["dp", "dp"], "a name occurs twice"),
        (("cpu", [[0, 1]]), ["dp", ""], "not empty"),
        (("tpu", [0, 1]), None, '\'tpu\' is no device type dtorch knows: write "cpu" or "cuda"'),
        (("cpu:x",), None, "is no device type"),
        (("cpu:1", [0, 1]), None, "the ids say which devices"),
    ],
)
def test_refused(args: tuple[object, ...], names: list[str] | None, message: str) -> None:
    with pytest.raises(DeviceMeshError, match=message):
        DeviceMesh(*args, mesh_dim_names=names)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("shape", [0, -1, (), (2, 0), (2, 1.5), True])
def test_refused_shapes(shape: object) -> None:
    with pytest.raises(DeviceMeshError, match="sizes of at least 1"):
        init_device_mesh("cpu", shape)  # pyright: ignore[reportArgumentType]


def test_there_is_no_current_rank(grid: DeviceMesh) -> None:
    for call in (grid.get_rank, grid.get_local_rank, grid.get_coordinate):
        with pytest.raises(DeviceMeshError, match="no current rank; "):
            call()
    with pytest.raises(DeviceMeshError, match=r"t\.redistribute\(placements=…\)"):
        grid.get_group("dp")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SIMULATE, raising=False)
    monkeypatch.setattr("dtorch.mesh.gpu_count", lambda: 2)


@pytest.mark.usefixtures("two_gpus")
def test_more_cuda_ids_than_gpus() -> None:
    assert init_device_mesh("cuda", 2).first_device == torch.device("cuda", 0)
    with pytest.raises(DeviceMeshError, match=f"cuda:3 is not there, this machine has 2 GPUs.*set {SIMULATE}=1"):
        init_device_mesh("cuda", (2, 2))
    with pytest.raises(DeviceMeshError, match="cuda:2 is not there"):
        DeviceMesh("cuda:2")


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SIMULATE, raising=False)
    monkeypatch.setattr("dtorch.mesh.gpu_count", lambda: 0)
    with pytest.raises(DeviceMeshError, match=r'this machine has no GPU\. Use a "cpu" mesh'):
        DeviceMesh("cuda")


@pytest.mark.parametrize("switch", ["1", "true", "True"])
def test_simulated_gpus(monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    monkeypatch.setattr("dtorch.mesh.gpu_count", lambda: 0)
    monkeypatch.setenv(SIMULATE, switch)
    monkeypatch.delenv(SIMULATED_GPUS, raising=False)
    assert init_device_mesh("cuda", (2, 4)).nranks == 8
    with pytest.raises(DeviceMeshError, match=f"has 8 GPUs.*set {SIMULATED_GPUS}=9"):
        init_device_mesh("cuda", (3, 3))
    monkeypatch.setenv(SIMULATED_GPUS, "9")
    assert init_device_mesh("cuda", (3, 3)).nranks == 9
    monkeypatch.setenv(SIMULATED_GPUS, "many")
    with pytest.raises(ConfigError, match="give a number of GPUs"):
        init_device_mesh("cuda", 2)
    monkeypatch.setenv(SIMULATE, "yes")
    with pytest.raises(ConfigError, match="write 1 or true"):
        init_device_mesh("cuda", 2)


def test_a_cpu_mesh_may_be_larger_than_the_machine() -> None:
    mesh = init_device_mesh("cpu", (3, 2, 4, 3, 6))
    assert mesh.nranks == 432
    assert mesh.get_coordinate(431) == (2, 1, 3, 2, 5)


def test_as_mesh(grid: DeviceMesh) -> None:
    assert as_mesh(grid) is grid
    assert as_mesh("cpu:1") is DeviceMesh("cpu", [1])
    assert as_mesh(torch.device("cpu")) is DeviceMesh("cpu")


def test_meshes_are_made_without_torch() -> None:
    code = "import sys, dtorch.mesh as m; m.DeviceMesh('cpu', [0, 1]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("shape", [2.5, None, "2", [2, 2.5], [True], []])
def test_a_shape_that_is_none_is_refused(shape: Any) -> None:
    with pytest.raises(DeviceMeshError, match="must be one or more sizes of at least 1"):
        init_device_mesh("cpu", shape)
