"""``torch.compile``: what has dtorch tensors runs as it stands; what has none is compiled as without dtorch."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dtorch
from dtorch import Shard, init_device_mesh

from .traps import same

Graphs = list[Any]


def model(mesh: dtorch.DeviceMesh) -> tuple[nn.Module, nn.Module]:
    """A small model on the mesh, and the same one plain."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))
    with dtorch.device_mesh(mesh):
        ours = nn.Sequential(dtorch.nn.Linear(4, 8), nn.GELU(), dtorch.nn.LayerNorm(8), dtorch.nn.Linear(8, 3))
    ours.load_state_dict(plain.state_dict())
    return ours, plain


def counted(graphs: Graphs) -> Any:
    """A backend that notes what it was given, and runs it."""

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph

    return backend


def test_a_training_step(capfd: pytest.CaptureFixture[str]) -> None:
    mesh = init_device_mesh("cpu", 2)
    ours, plain = model(mesh)
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    graphs: Graphs = []
    losses: list[list[float]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for module, data in ((ours, dtorch.distribute_tensor(x, mesh, [Shard(0)])), (plain, x)):
            optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)

            def step(data: torch.Tensor, y: torch.Tensor, module: Any = module, optimizer: Any = optimizer) -> Any:
                optimizer.zero_grad()
                loss = F.cross_entropy(module(data), y)
                loss.backward()
                optimizer.step()
                return loss

            run = torch.compile(step, backend=counted(graphs)) if module is ours else step
            losses.append([run(data, y).item() for _ in range(4)])
    torch.testing.assert_close(losses[0], losses[1])
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        same(p.detach(), q.detach(), 1e-5)
    assert graphs == []
    assert capfd.readouterr().err == ""


def test_modules_and_their_methods() -> None:
    mesh = init_device_mesh("cpu", 2)
    ours, plain = model(mesh)
    x = torch.randn(6, 4)
    data, graphs = dtorch.distribute_tensor(x, mesh, [Shard(0)]), Graphs()
    compiled: Any = torch.compile(ours, backend=counted(graphs))
    same(compiled(data).detach(), plain(x).detach(), 1e-5)
    assert next(iter(compiled.state_dict())) == "_orig_mod.0.weight"
    ours.compile(backend=counted(graphs))
    same(ours(data).detach(), plain(x).detach(), 1e-5)
    assert graphs == []
    # Modules are called by the same code of torch's: plain ones are compiled still.
    same(torch.compile(plain, backend=counted(graphs))(x).detach(), plain(x).detach())
    assert len(graphs) == 1


def test_tensors_that_the_function_finds_by_itself() -> None:
    mesh = init_device_mesh("cpu", 2)
    weight = dtorch.distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    weights = {"a": [weight]}

    @torch.compile(backend="eager")
    def scaled(x: torch.Tensor) -> Any:
        return (x * 2 + 1) * weights["a"][0]

    for _ in range(2):
        got = scaled(torch.ones(4))
        assert isinstance(got, dtorch.Tensor) and got.placements == [Shard(0)]
        same(got, torch.arange(4.0) * 3)


def test_gradients_pass() -> None:
    x = dtorch.distribute_tensor(torch.randn(6, 4), init_device_mesh("cpu", 2), [Shard(0)]).requires_grad_()
    torch.compile(lambda t: (t * t).sum(), backend="eager")(x).backward()  # type: ignore[union-attr]
    assert x.grad is not None
    same(x.grad, 2 * x.detach())


def test_a_guard_is_heard_whichever_call_came_first() -> None:
    mesh = init_device_mesh("cpu", 2)

    def make() -> torch.Tensor:
        return torch.zeros(3) + torch.arange(3.0)

    def other() -> torch.Tensor:
        return torch.zeros(3) + torch.arange(3.0)

    first, second = (torch.compile(f, backend="eager") for f in (make, other))
    assert type(first()) is torch.Tensor
    with dtorch.device_mesh(mesh):
        assert isinstance(first(), dtorch.Tensor) and isinstance(second(), dtorch.Tensor)
    for f in (first, second):
        assert type(f()) is torch.Tensor
        same(f(), torch.arange(3.0))

    @torch.compile(backend="eager")
    def both() -> tuple[torch.Tensor, torch.Tensor]:
        before = torch.ones(2) + 1
        with dtorch.device_mesh(mesh):
            return before, torch.ones(2) + 1

    for _ in range(2):
        a, b = both()
        assert type(a) is torch.Tensor and isinstance(b, dtorch.Tensor)
        same(a, b)


def test_plain_programs_are_compiled_whole() -> None:
    graphs = Graphs()

    @torch.compile(backend=counted(graphs), fullgraph=True)
    def plain(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return x + torch.zeros(3) + F.one_hot(i, 3) + nn.utils.rnn.pad_sequence([x, x[:1]]).sum()

    x, i = torch.ones(3), torch.tensor([0, 1, 2])
    same(plain(x, i), x + F.one_hot(i, 3) + 4)
    assert len(graphs) == 1


def test_a_whole_graph_of_what_is_not_traced_is_refused() -> None:
    x = dtorch.ones(3)
    with pytest.raises(RuntimeError, match="fullgraph=True found no compiled frames"):
        torch.compile(lambda t: t * 5, backend="eager", fullgraph=True)(x)


def test_dynamo_is_not_imported_before_it_is_needed() -> None:
    code = "import sys, dtorch; dtorch.Tensor; dtorch.nn.Linear; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
