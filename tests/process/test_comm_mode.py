"""CommDebugMode: the collectives of a piece of a program, by kind and by module."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard, init_device_mesh
from dtorch.distributed.tensor import CommDebugMode, debug
from dtorch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

R, P, S = Replicate(), Partial(), Shard
MESH = init_device_mesh("cpu", 2, mesh_dim_names=["tp"])
GRID = init_device_mesh("cpu", (2, 2))


def test_every_kind() -> None:
    x = torch.randn(4, 4)
    t = {p: dtorch.distribute_tensor(x, MESH, [p]) for p in (R, P, S(0), S(1))}
    with CommDebugMode() as mode:
        t[S(0)].redistribute(placements=[R])
        t[S(0)].redistribute(placements=[S(1)])
        t[P].redistribute(placements=[S(0)])
        t[P].redistribute(placements=[R])
        t[R].redistribute(placements=[S(0)])
        t[S(0)].redistribute(GRID, [R, R])
        _ = t[S(0)] + t[R]
        t[S(0)].to_torch()
    expected = {"all_gather": 1, "all_to_all": 1, "reduce_scatter": 1, "all_reduce": 1, "send": 1}
    assert mode.get_comm_counts() == expected
    assert mode.get_total_counts() == mode.commands == 5
    assert mode.bytes_moved > 0
    counts = mode.get_comm_counts()
    # As a program written for torch asks.
    assert counts[torch.ops.c10d.allreduce_] == 1
    assert counts[torch.ops.c10d.reduce_scatter_] == 1
    assert counts["c10d_functional.all_gather_into_tensor"] == 1
    assert counts["broadcast"] == 0
    t[P].redistribute(placements=[R])
    assert mode.get_total_counts() == 5, "the mode has ended"
    with mode:
        t[P].to_torch()
    assert mode.get_comm_counts() == {"all_reduce": 1}


def test_recipes_are_counted() -> None:
    t = dtorch.distribute_tensor(torch.randn(6, 4), MESH, [S(0)])
    with CommDebugMode() as mode:
        t.std()
    assert mode.get_total_counts() > 0
    with CommDebugMode() as mode, dtorch.auto_redistribute():
        t.softmax(0)
    assert mode.get_total_counts() > 0


class MLP(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 12), torch.nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([MLP(), MLP()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_tensor_parallel_needs_one_all_reduce_per_pair(tmp_path: Path) -> None:
    model = parallelize_module(Model(), MESH, {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()})
    x = dtorch.randn(4, 8, device_mesh=MESH, requires_grad=True)
    with CommDebugMode() as mode:
        y = model(x)
        assert mode.get_comm_counts() == {"all_reduce": 2}
        y.sum().backward()
    assert mode.get_comm_counts() == {"all_reduce": 4}
    assert mode.module_counts["Model"] == {"all_reduce": 2}
    assert mode.module_counts["Model.layers.0"] == mode.module_counts["Model.layers.1.down"] == {"all_reduce": 1}
    assert mode.module_counts["Model.layers.0.up"] == {}
    assert mode.module_counts["backward"] == {"all_reduce": 2}
    assert mode.get_sharding_info()["Model.layers.0.up.weight"] == [S(0)]
    assert mode.get_parameter_info()["Model.layers.0.up"]["weight"] is model.layers[0].up.weight
    table = mode.generate_comm_debug_tracing_table(noise_level=1)
    assert table.splitlines()[:4] == ["Global", "  *all_reduce: 4", "  Model", "    *all_reduce: 2"]
    assert "          *weight: [Shard(0)]" in table.splitlines()
    mode.log_comm_debug_tracing_table_to_file(str(tmp_path / "table.txt"))
    assert (tmp_path / "table.txt").read_text().startswith("Global\n")


def test_hooks_go_with_the_mode_and_errors_leave_no_trace() -> None:
    model = MLP()
    with CommDebugMode() as mode:
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 3))
        model(torch.ones(2, 8))
    assert not model._forward_hooks and not model.up._forward_hooks
    assert list(mode.module_counts) == ["MLP", "MLP.up", "MLP.down"]


async def test_tasks_do_not_see_each_other() -> None:
    t = dtorch.distribute_tensor(torch.randn(4, 4), MESH, [P])

    async def count(n: int) -> int:
        with CommDebugMode() as mode:
            for _ in range(n):
                t.redistribute(placements=[R])
                await asyncio.sleep(0)
        return mode.get_total_counts()

    assert await asyncio.gather(count(3), count(1)) == [3, 1]


def test_the_names_are_where_torch_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert debug.CommDebugMode is dtorch.CommDebugMode is CommDebugMode
    dtorch.visualize_sharding(dtorch.zeros(2, 2, device_mesh=MESH, placements=[S(0)]))
    assert "row 1" in capsys.readouterr().out


def test_no_hook_is_left_on_modules() -> None:
    """torch.compile warns where there are any."""
    before = torch.nn.modules.module._has_any_global_hook()
    with CommDebugMode(), CommDebugMode():
        assert torch.nn.modules.module._has_any_global_hook()
    assert torch.nn.modules.module._has_any_global_hook() == before
