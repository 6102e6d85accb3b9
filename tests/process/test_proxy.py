"""A proxy and the value it names never part: copies, pickles, assignments and views behave as plain tensors do.

The same steps are taken with plain tensors and with dtorch's; after each, all tensors must look alike, and at the end
hold the same values on every rank.
"""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import dtorch
from dtorch import Replicate, Shard, init_device_mesh

from .programs import Digits, Skip, compare

COUNT = int(os.environ.get("DTORCH_PROGRAMS", "0"))
SHAPES = [(4, 3), (3, 4), (4,), (2, 1, 3), (1, 5)]


class Twins:
    """Plain tensors and dtorch's, side by side."""

    def __init__(self) -> None:
        self.mesh = init_device_mesh("cpu", (2,))
        self.plain: list[torch.Tensor] = []
        self.ours: list[torch.Tensor] = []
        self.trace: list[str] = []

    def new(self, d: Digits) -> None:
        shape = d.of(SHAPES)
        value = torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape).clone()
        placement = Shard(d.below(len(shape))) if d.below(2) else Replicate()
        self.trace.append(f"new {list(shape)} {placement}")
        self.plain.append(value)
        self.ours.append(dtorch.distribute_tensor(value, self.mesh, [placement]))
        if d.below(3) == 0:
            self.plain[-1].requires_grad_()
            self.ours[-1].requires_grad_()

    def step(self, name: str, numbers: tuple[int, ...]) -> None:
        if name == "new" or not self.plain:
            self.new(Digits(numbers))
            return
        i = Digits(numbers).below(len(self.plain))
        shape, kind = list(self.plain[i].shape), self.ours[i].placements  # type: ignore[attr-defined]
        try:
            ours = self.attempt(name, numbers, self.ours)
        except dtorch.PlacementError:
            return
        except Skip:
            return
        plain = self.attempt(name, numbers, self.plain)
        self.trace.append(f"{name}({i}: {shape} {kind}) {numbers}")
        for a, b in ((ours, plain), (plain, ours)):
            if isinstance(b, Exception):
                assert isinstance(a, type(b)), f"torch: {plain!r}, dtorch: {ours!r}"
        for a, b in zip(self.plain, self.ours, strict=True):
            alike(a, b)

    def attempt(self, name: str, numbers: tuple[int, ...], tensors: list[torch.Tensor]) -> Any:
        d = Digits(numbers)
        i = d.below(len(tensors))
        try:
            made = STEPS[name](tensors, i, d)
        except (dtorch.PlacementError, Skip):
            raise
        except Exception as error:
            return error
        if isinstance(made, torch.Tensor):
            if tensors is self.ours and not isinstance(made, dtorch.Tensor):
                made = dtorch.distribute_tensor(made.detach(), self.mesh, [Replicate()]).requires_grad_(
                    made.requires_grad
                )
            tensors.append(made)
        return None

    def run(self, steps: list[tuple[str, tuple[int, ...]]]) -> None:
        try:
            for name, numbers in steps:
                self.step(name, numbers)
            for a, b in zip(self.plain, self.ours, strict=True):
                compare(a, b)
                assert (a.grad is None) == (b.grad is None)
                if a.grad is not None and b.grad is not None:
                    compare(a.grad, b.grad)
        except Exception as error:
            error.add_note("\n".join(self.trace))
            raise


def alike(a: torch.Tensor, b: torch.Tensor) -> None:
    """Whether `b` looks like `a` without being read."""
    assert type(b) is dtorch.Tensor
    assert (b.shape, b.dtype, b.requires_grad, b.is_leaf) == (a.shape, a.dtype, a.requires_grad, a.is_leaf)
    assert isinstance(b, nn.Parameter) == isinstance(a, nn.Parameter)
    assert b._spec.shape == tuple(b.shape) and b._spec.dtype == b.dtype
    assert getattr(b, "mark", None) == getattr(a, "mark", None)


def drop(tensors: list[torch.Tensor], i: int, d: Digits) -> None:
    if len(tensors) > 1:
        del tensors[i]
        gc.collect()


def replaced(tensors: list[torch.Tensor], i: int, new: torch.Tensor) -> None:
    tensors[i] = new


def saved(t: torch.Tensor) -> torch.Tensor:
    """Through a file; what comes back is plain."""
    file = io.BytesIO()
    torch.save({"t": t}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["t"]


def other(tensors: list[torch.Tensor], i: int, d: Digits) -> torch.Tensor:
    j = d.below(len(tensors))
    if j == i:
        raise Skip
    return tensors[j]


def assign_data(tensors: list[torch.Tensor], i: int, d: Digits) -> None:
    tensors[i].data = other(tensors, i, d)


def swap(tensors: list[torch.Tensor], i: int, d: Digits) -> None:
    a, b = tensors[i], other(tensors, i, d)
    if a.requires_grad or b.requires_grad or a._is_view() or b._is_view() or a._base is not None:
        raise Skip
    if weakref.getweakrefs(a) or weakref.getweakrefs(b):
        raise Skip  # once required grad: watched for its gradient's placements, and torch swaps nothing that is watched
    torch.utils.swap_tensors(a, b)


def in_module(tensors: list[torch.Tensor], i: int, d: Digits) -> None:
    """As a parameter of a module whose dtype changes, which replaces its data."""
    t = tensors[i]
    if not t.is_leaf:
        raise Skip
    module = nn.Module()
    module.weight = t if isinstance(t, nn.Parameter) else nn.Parameter(t)
    tensors[i] = module.to(d.of([torch.float32, torch.float64])).weight


def through_vector(tensors: list[torch.Tensor], i: int, d: Digits) -> None:
    """Flattened together, doubled, and put back."""
    both = [tensors[i], other(tensors, i, d)]
    if any(t._is_view() or not t.is_contiguous() or t.dtype != both[0].dtype for t in both):
        raise Skip
    with torch.no_grad():
        vector = nn.utils.parameters_to_vector(both) * 2
        nn.utils.vector_to_parameters(vector, both)


def backward(tensors: list[torch.Tensor], i: int, d: Digits) -> None:
    with dtorch.auto_redistribute():
        (tensors[i] * tensors[i]).sum().backward()


def inference(tensors: list[torch.Tensor], i: int, d: Digits) -> None:
    with torch.inference_mode():
        t = tensors[i]
        assert t.view(-1)[:1].add(1).numel() == 1
        t.t() if t.ndim == 2 else t.relu()


def marked(t: torch.Tensor, value: int) -> None:
    t.mark = value  # type: ignore[attr-defined]


Steps = dict[str, Callable[[list[torch.Tensor], int, Digits], Any]]
STEPS: Steps = {
    "copy": lambda ts, i, d: copy.copy(ts[i]),
    "deepcopy": lambda ts, i, d: copy.deepcopy(ts[i]),
    "pickle": lambda ts, i, d: pickle.loads(pickle.dumps(ts[i].detach())),
    "save": lambda ts, i, d: saved(ts[i].detach()),
    "data": lambda ts, i, d: ts[i].data,
    "data =": assign_data,
    "set_": lambda ts, i, d: ts[i].detach().clone().set_(other(ts, i, d).detach()),
    "swap": swap,
    "drop": drop,
    "alias": lambda ts, i, d: replaced(ts, i, ts[i].detach()),
    "detach": lambda ts, i, d: ts[i].detach(),
    "detach_": lambda ts, i, d: ts[i].detach_() if not ts[i]._is_view() else None,
    "clone": lambda ts, i, d: ts[i].clone(),
    "view": lambda ts, i, d: ts[i].view(-1),
    "t": lambda ts, i, d: ts[i].transpose(0, -1),
    "row": lambda ts, i, d: ts[i][0],
    "rows": lambda ts, i, d: ts[i][: d.below(3)],
    "unsqueeze": lambda ts, i, d: ts[i].unsqueeze(d.below(2)),
    "t_": lambda ts, i, d: (ts[i].transpose_(0, -1), None)[1],
    "squeeze_": lambda ts, i, d: (ts[i].squeeze_(), None)[1],
    "unsqueeze_": lambda ts, i, d: (ts[i].unsqueeze_(0), None)[1] if ts[i].ndim < 4 else None,
    "swapaxes_": lambda ts, i, d: (ts[i].swapaxes_(0, -1), None)[1],
    "add_": lambda ts, i, d: (ts[i].add_(1), None)[1],
    "quiet mul_": lambda ts, i, d: torch.no_grad()(lambda: (ts[i].mul_(0.5), None)[1])(),
    "data fill_": lambda ts, i, d: (ts[i].data.fill_(d.below(9)), None)[1],
    "row zero_": lambda ts, i, d: (ts[i].detach()[0].zero_(), None)[1],
    "copy_": lambda ts, i, d: (ts[i].detach().copy_(other(ts, i, d).detach().clone()), None)[1],
    "Parameter": lambda ts, i, d: nn.Parameter(ts[i].detach(), bool(d.below(2))),
    "to module": in_module,
    "vector": through_vector,
    "requires grad": lambda ts, i, d: (ts[i].requires_grad_(bool(d.below(2))), None)[1],
    "double": lambda ts, i, d: ts[i].to(d.of([torch.float32, torch.float64])),
    "backward": backward,
    "zero grad": lambda ts, i, d: setattr(ts[i], "grad", None),
    "inference": inference,
    "mark": lambda ts, i, d: marked(ts[i], d.below(9)),
    "format": lambda ts, i, d: (repr(ts[i]), f"{ts[i]}", None)[2],
}
NUMBERS = st.tuples(*[st.integers(0, 11)] * 5)
PROGRAMS = st.lists(st.tuples(st.sampled_from(["new", *STEPS]), NUMBERS), min_size=3, max_size=16)


@pytest.mark.timeout(120 + COUNT)
@pytest.mark.filterwarnings("ignore")
def test_copies_assignments_and_views_in_any_order() -> None:
    @settings(
        max_examples=COUNT or 100,
        derandomize=not COUNT,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(steps=PROGRAMS)
    def run(steps: list[tuple[str, tuple[int, ...]]]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Twins().run([("new", (0, 1, 1, 1, 1)), *steps])

    run()
