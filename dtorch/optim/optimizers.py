"""torch's optimizers, made cheap for parameters that live elsewhere.

Each step of a for-loop optimizer issues some eight commands a parameter; the foreach form, eight in all. So:

* an optimizer whose foreach form gives the same bits as its for-loop uses it for dtorch parameters, unless told
  otherwise (compared over five steps on random parameters; the others differ in the last bit and keep the loop,
  since a training run on one device promises torch's bits);
* parameters on different meshes make different foreach calls;
* step counters are plain tensors on the client, even inside ``with dtorch.device_mesh(mesh)``: reading them back
  each step would wait for the executors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import copy_context
from functools import cache, wraps
from typing import Any

import torch
from torch import optim
from torch.optim.optimizer import Optimizer
from torch.optim.optimizer import _foreach_supported_types as optimizer_types
from torch.utils._foreach_utils import _foreach_supported_types as util_types

from .._tensor import Tensor
from ..mesh import DeviceMesh
from ..nn.placing import plain_factories, put

__all__ = ["SAME_BITS", "install", "optimizer_class"]

SAME_BITS = frozenset({"Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "RMSprop", "Rprop", "SGD"})

Grouped = dict[Any, tuple[list[list[Any]], list[int]]]


class _OnMeshes(Optimizer):
    """Mixed in before a torch optimizer."""

    _foreach_by_default = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with plain_factories():
            super().__init__(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._choose_foreach(self.param_groups[-1])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what any optimizer of this kind saved, on any mesh or in plain torch; state goes where its
        parameter lies."""
        with plain_factories():
            super().load_state_dict(state_dict)
        for group in self.param_groups:
            self._choose_foreach(group)
            for p in group["params"]:
                self._take_along(p)

    def __setstate__(self, state: dict[str, Any]) -> None:
        with plain_factories():
            super().__setstate__(state)

    def _take_along(self, p: torch.Tensor) -> None:
        state = self.state.get(p)
        if not state or not isinstance(p, Tensor):
            return
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and name != "step" and value.shape == p.shape:
                state[name] = put(value, p._spec.mesh, p._spec.placements)

    def _choose_foreach(self, group: dict[str, Any]) -> None:
        undecided = "foreach" in group and group["foreach"] is None and not group.get("fused")
        # As torch decides for itself: a tensor as learning rate, or a step to differentiate, wants the loop.
        possible = not group.get("differentiable") and not isinstance(group.get("lr"), torch.Tensor)
        if undecided and possible and self._foreach_by_default:
            if all(isinstance(p, Tensor) for p in group["params"]):
                group["foreach"] = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step of the optimizer; `closure` recomputes the loss, as in torch."""
        users = copy_context()
        in_the_users_context = None if closure is None else lambda: users.run(closure)
        with plain_factories():
            return super().step(in_the_users_context)  # type: ignore[arg-type]


# Not to be hooked by torch, which would run the step hooks here and again in the step that this one calls.
_OnMeshes.step.hooked = True  # type: ignore[attr-defined]


def _hook(cls: type[Optimizer]) -> None:
    """Do now what torch does to ``cls.step`` when it makes the first instance: ours calls it, and is none."""
    if not getattr(cls.step, "hooked", False):
        cls.step = Optimizer.profile_hook_step(cls.step)  # type: ignore[method-assign]
        cls.step.hooked = True  # type: ignore[attr-defined]


@cache
def optimizer_class(name: str) -> type[Any]:
    """The class ``dtorch.optim.<name>``: a subclass of torch's optimizer of that name."""
    cls: type[Optimizer] = getattr(optim, name)
    _hook(cls)
    body = {
        "__module__": "dtorch.optim",
        "__qualname__": name,
        "__doc__": cls.__doc__,
        "__signature__": inspect.signature(cls),
        "_foreach_by_default": name in SAME_BITS,
    }
    return type(name, (_OnMeshes, cls), body)


def _mesh_of(t: Any) -> DeviceMesh | None:
    return t._spec.mesh if isinstance(t, Tensor) else None


def _by_mesh(group: Callable[..., Grouped]) -> Callable[..., Grouped]:
    """Wrap torch's grouping by device and dtype, which cannot see meshes: they group too."""

    @wraps(group)
    def grouped(tensorlistlist: list[list[Any]], with_indices: bool = False) -> Grouped:
        meshes = [_mesh_of(t) for t in tensorlistlist[0]]
        kinds = set(meshes)
        if len(kinds) < 2:
            return group(tensorlistlist, with_indices)
        out: Grouped = {}
        for mesh in kinds:
            at = [i for i, m in enumerate(meshes) if m is mesh]
            part = [[ts[i] for i in at] if ts else ts for ts in tensorlistlist]
            for (device, dtype), (lists, indices) in group(part, with_indices).items():
                # torch reads the device of a key and passes over the rest.
                out[device, (dtype, mesh)] = (lists, [at[i] for i in indices])
        return out

    grouped.by_mesh = True  # type: ignore[attr-defined]
    return grouped


def install() -> None:
    """Tell torch that foreach functions take dtorch tensors, and have it group them by mesh."""
    for types in (optimizer_types, util_types):
        if Tensor not in types:
            types.append(Tensor)  # type: ignore[arg-type]
    if not getattr(Optimizer._group_tensors_by_device_and_dtype, "by_mesh", False):
        by_mesh = _by_mesh(Optimizer._group_tensors_by_device_and_dtype)
        Optimizer._group_tensors_by_device_and_dtype = staticmethod(by_mesh)  # type: ignore[method-assign]
