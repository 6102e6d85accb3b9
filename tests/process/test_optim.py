"""dtorch.optim: torch's optimizers, the same bits, few commands."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.optim.optimizer import _foreach_supported_types

import dtorch
from dtorch import Replicate, Shard, init_device_mesh
from dtorch.optim.optimizers import SAME_BITS

EVERY: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {}),
    ("Adagrad", {}),
    ("Adadelta", {}),
    ("Adamax", {}),
    ("RMSprop", {"momentum": 0.9}),
    ("Rprop", {}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("ASGD", {}),
]


def start() -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(5, 4, generator=g), torch.randn(4, generator=g)]


def gradients(step: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(100 + step)
    return [torch.randn(5, 4, generator=g), torch.randn(4, generator=g)]


def train(opt: torch.optim.Optimizer, params: list[Any], steps: range = range(3)) -> None:
    for step in steps:
        for p, grad in zip(params, gradients(step), strict=True):
            ours = isinstance(p, dtorch.Tensor)
            p.grad = dtorch.distribute_tensor(grad, p.device_mesh, p.placements) if ours else grad
        opt.step()


def plain() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(v) for v in start()]


def placed(mesh: dtorch.DeviceMesh | None = None, placements: Any = None) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(dtorch.Tensor(v, device_mesh=mesh, placements=placements)) for v in start()]


def equal(ours: list[Any], theirs: list[Any]) -> bool:
    return all(torch.equal(a.detach().to_torch(), b.detach()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("name", "options"), EVERY)
@pytest.mark.parametrize("shard", [False, True])
def test_bits_are_torchs(name: str, options: dict[str, Any], shard: bool) -> None:
    theirs = plain()
    train(getattr(torch.optim, name)(theirs, lr=0.01, **options), theirs)
    ours = placed(init_device_mesh("cpu", 2), [Shard(0)]) if shard else placed()
    opt = getattr(dtorch.optim, name)(ours, lr=0.01, **options)
    train(opt, ours)
    assert equal(ours, theirs)
    assert isinstance(opt, getattr(torch.optim, name))
    assert opt.param_groups[0]["foreach"] is (True if name in SAME_BITS else None)
    if shard:
        assert [p.placements for p in ours] == [[Shard(0)], [Shard(0)]]


def test_foreach_is_a_default_only() -> None:
    assert dtorch.optim.AdamW(placed(), foreach=False).param_groups[0]["foreach"] is False
    assert dtorch.optim.AdamW(plain()).param_groups[0]["foreach"] is None
    assert dtorch.optim.AdamW(placed(), lr=torch.tensor(0.1)).param_groups[0]["foreach"] is None
    opt = dtorch.optim.AdamW(placed())
    opt.add_param_group({"params": plain()})
    assert [g["foreach"] for g in opt.param_groups] == [True, None]
    assert dtorch.Tensor in _foreach_supported_types


def test_step_counters_stay_on_the_client() -> None:
    with dtorch.device_mesh(init_device_mesh("cpu", 2)):
        for name in ("AdamW", "Adagrad", "RAdam"):
            params = placed()
            opt = getattr(dtorch.optim, name)(params)
            train(opt, params, range(2))
            for p in params:
                assert type(opt.state[p]["step"]) is torch.Tensor
                assert opt.state[p]["step"] == 2
                assert all(isinstance(v, dtorch.Tensor) for k, v in opt.state[p].items() if k != "step")


def test_parameters_on_several_meshes() -> None:
    first, second = init_device_mesh("cpu", (2, 1), mesh_dim_names=["pp", "dp"]).unbind("pp")
    theirs = plain()
    train(torch.optim.AdamW(theirs), theirs)
    ours = [
        torch.nn.Parameter(dtorch.Tensor(v, device_mesh=mesh)) for v, mesh in zip(start(), (first, second), strict=True)
    ]
    train(dtorch.optim.AdamW(ours), ours)
    assert equal(ours, theirs)
    assert ours[1].device_mesh is second


def test_hooks_run_once_and_schedulers_work() -> None:
    params, calls = placed(), []
    torch.optim.AdamW(plain())
    opt = dtorch.optim.AdamW(params, lr=1.0)
    opt.register_step_pre_hook(lambda *_: calls.append("before"))
    opt.register_step_post_hook(lambda *_: calls.append("after"))
    schedule = dtorch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    train(opt, params, range(1))
    schedule.step()
    assert calls == ["before", "after"]
    assert opt.param_groups[0]["lr"] == 0.5


def test_the_closure_runs_in_the_callers_context() -> None:
    mesh = init_device_mesh("cpu", 2)
    with dtorch.device_mesh(mesh):
        p = torch.nn.Parameter(torch.ones(3))
        opt, made = dtorch.optim.SGD([p], lr=0.1), []

        def closure() -> torch.Tensor:
            made.append(torch.ones(3))
            loss = (p * made[-1]).sum()
            loss.backward()
            return loss

        loss = opt.step(closure)
    assert made[0].device_mesh is mesh
    assert loss.item() == 3
    assert torch.allclose(p.detach().to_torch(), torch.full((3,), 0.9))


def test_state_is_loaded_from_torch_and_other_meshes() -> None:
    theirs = plain()
    reference = torch.optim.AdamW(theirs)
    train(reference, theirs, range(2))
    halfway, saved = [p.detach().clone() for p in theirs], pickle.dumps(reference.state_dict())
    train(reference, theirs, range(2, 4))
    mesh = init_device_mesh("cpu", 2)
    ours = [torch.nn.Parameter(dtorch.Tensor(v, device_mesh=mesh, placements=[Shard(0)])) for v in halfway]
    opt = dtorch.optim.AdamW(ours)
    opt.load_state_dict(pickle.loads(saved))
    assert opt.state[ours[0]]["exp_avg"].placements == [Shard(0)]
    assert opt.param_groups[0]["foreach"] is True
    train(opt, ours, range(2, 4))
    assert equal(ours, theirs)
    other = [torch.nn.Parameter(p.detach().redistribute(placements=[Replicate()])) for p in ours]
    moved = dtorch.optim.AdamW(other)
    moved.load_state_dict(opt.state_dict())
    assert moved.state[other[0]]["exp_avg"].placements == [Replicate()]
    train(moved, other, range(4, 5))
    train(reference, theirs, range(4, 5))
    assert equal(other, theirs)


def test_copies_and_pickles() -> None:
    params = placed()
    opt = dtorch.optim.SGD(params, momentum=0.9)
    train(opt, params, range(1))
    twin = copy.deepcopy(opt)
    assert type(twin) is dtorch.optim.SGD
    again = pickle.loads(pickle.dumps(opt))
    assert type(again) is dtorch.optim.SGD
    assert again.param_groups[0]["momentum"] == 0.9


def test_every_optimizer_of_torch_has_its_name_here() -> None:
    for name in torch.optim.__all__:
        ours, theirs = getattr(dtorch.optim, name), getattr(torch.optim, name)
        if isinstance(theirs, type):
            assert issubclass(ours, theirs)
    assert dtorch.optim.Optimizer is torch.optim.Optimizer


def test_a_grad_scaler_unscales_gradients() -> None:
    """It writes the gradients and, beside them, a flag of its own that is no dtorch tensor."""

    def train(param: torch.Tensor, spoilt: int | None) -> tuple[torch.Tensor, float]:
        param.requires_grad_()
        optimizer = torch.optim.SGD([param], lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        for step in range(3):
            optimizer.zero_grad()
            loss = param.square().sum() * (float("inf") if step == spoilt else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return param.detach(), scaler.get_scale()

    plain = torch.arange(6.0).reshape(3, 2)
    for spoilt in (None, 1):
        expected, scale = train(plain.clone(), spoilt)
        found, found_scale = train(dtorch.tensor(plain.tolist()), spoilt)
        assert torch.equal(found.to_torch(), expected)  # type: ignore[attr-defined]
        assert found_scale == scale


def test_a_fused_step_with_state_that_is_plain() -> None:
    results = []
    for make in (torch.tensor, dtorch.tensor):
        param = make([1.0, 2.0, 3.0]).requires_grad_()
        param.grad = make([0.5, -1.0, 2.0])
        optimizer = torch.optim.AdamW([param], lr=0.1, fused=True)
        optimizer.step()
        for name, value in optimizer.state[param].items():
            optimizer.state[param][name] = value.to_torch() if isinstance(value, dtorch.Tensor) else value
        optimizer.step()
        results.append(param.detach())
    assert torch.equal(results[1].to_torch(), results[0])
