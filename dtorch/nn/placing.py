"""Where the parameters and buffers of a module lie: moving them, and ``model.to(mesh)``.

A parameter that moves to another mesh or other placements is replaced by a new one, so moving comes before the
optimizer is made, as in torch's ``distribute_module``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module, Parameter, RNNBase

from .. import graph
from .._tensor import Tensor
from ..factories import distribute_tensor
from ..mesh import DeviceMesh
from ..placement import Placement, fitting
from ..spec import TensorSpec, resolve

__all__ = ["check_fits", "install", "move_module", "plain_factories", "put", "put_parameter", "replicate_rest"]


@contextmanager
def plain_factories() -> Generator[None]:
    """Inside, torch's factories make plain tensors on the client, even within ``dtorch.device_mesh(mesh)``."""
    token = graph._mesh.set(None)
    try:
        yield
    finally:
        graph._mesh.reset(token)


def spec_of(t: torch.Tensor) -> TensorSpec | None:
    """The spec of a dtorch tensor; None for a plain one."""
    return t._spec if isinstance(t, Tensor) else None


def put(t: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement] | None = None) -> Tensor:
    """`t`, a plain or a dtorch tensor, on `mesh` with `placements`; differentiable.

    On a slice such as ``mesh["tp"]`` the tensor lives on the parent and keeps its placements on the other dims.
    """
    spec = spec_of(t)
    target, wanted = resolve(mesh, placements, t.ndim, keep=spec)
    if isinstance(t, Tensor):
        return t if (t._spec.mesh, t._spec.placements) == (target, wanted) else t.redistribute(target, wanted)
    if t.is_meta:
        raise ValueError(
            f"a tensor of shape {list(t.shape)} on the meta device has no values to distribute; "
            "make the module inside `with dtorch.device_mesh(mesh):` instead"
        )
    return distribute_tensor(t, target, wanted)


def put_parameter(p: Parameter, mesh: DeviceMesh, placements: Sequence[Placement] | None = None) -> Parameter:
    """The parameter `p` on `mesh` with `placements`: itself where it lies so, else a new one with its values,
    its gradient and the attributes that users gave it.
    """
    with torch.no_grad():
        moved = put(p.detach(), mesh, placements)
        before, after = spec_of(p), spec_of(moved)
        if before is after:
            return p
        new = Parameter(moved, requires_grad=p.requires_grad)
        if p.grad is not None:
            new.grad = put(p.grad, mesh, placements)
    for name, value in vars(p).items():
        if not name.startswith("_"):
            setattr(new, name, value)
    return new


def replace_parameters(module: Module, new: Callable[[str, Parameter], Parameter], *, recurse: bool = True) -> None:
    """Put ``new(name, parameter)`` in the place of each parameter; one that is shared stays shared."""
    done: dict[int, tuple[Parameter, Parameter]] = {}
    for prefix, submodule in module.named_modules() if recurse else [("", module)]:
        for name, p in submodule._parameters.items():
            if p is None:
                continue
            if id(p) not in done:
                done[id(p)] = (p, new(f"{prefix}.{name}" if prefix else name, p))
            submodule._parameters[name] = done[id(p)][1]
        if isinstance(submodule, RNNBase):
            submodule._init_flat_weights()  # recurrent modules keep a list of their parameters


def _lies_elsewhere(t: torch.Tensor, mesh: DeviceMesh) -> bool:
    """Whether `t` is plain, or a tensor of one device, and so is to be taken along to `mesh`."""
    spec, target = spec_of(t), mesh.parent or mesh
    return spec is None or (spec.mesh is not target and not spec.mesh.is_distributed)


def replicate_rest(module: Module, mesh: DeviceMesh) -> None:
    """Replicate over `mesh` the parameters and buffers of `module` that lie on no distributed mesh yet."""
    replace_parameters(module, lambda _, p: put_parameter(p, mesh) if _lies_elsewhere(p, mesh) else p)
    for submodule in module.modules():
        for name, buffer in submodule._buffers.items():
            if buffer is not None and _lies_elsewhere(buffer, mesh):
                submodule._buffers[name] = put(buffer, mesh)


def move_module(module: Module, mesh: DeviceMesh) -> None:
    """What ``module.to(mesh)`` does: everything that is not on `mesh` already is replicated there."""
    target = mesh.parent or mesh

    def moved(t: torch.Tensor) -> bool:
        spec = spec_of(t)
        return spec is None or spec.mesh is not target

    replace_parameters(module, lambda _, p: put_parameter(p, target) if moved(p) else p)
    for submodule in module.modules():
        for name, buffer in submodule._buffers.items():
            if buffer is not None and moved(buffer):
                submodule._buffers[name] = put(buffer, target)


def check_fits(module: Module, what: str, placements: Sequence[Any] | Any | None) -> None:
    """Refuse placements of which some Shard fits no parameter: nothing would have been sharded.

    Raises:
        ValueError: naming the dims that the parameters have.
    """
    if placements is None:
        return
    given = tuple(placements) if isinstance(placements, Sequence) else (placements,)
    shapes = {name: list(p.shape) for name, p in module.named_parameters()}
    for p in given:
        if shapes and all(fitting((p,), len(shape)) != (p,) for shape in shapes.values()):
            have = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
            raise ValueError(f"{what}: placements={list(given)}: no parameter has the dim of {p}; it has {have}")


def _to_with_mesh(to: Callable[..., Module]) -> Callable[..., Module]:
    @functools.wraps(to)
    def to_mesh_or(self: Module, *args: Any, **kwargs: Any) -> Module:
        given = args[0] if args else kwargs.get("device_mesh", kwargs.get("device"))
        if not isinstance(given, DeviceMesh):
            return to(self, *args, **kwargs)
        kwargs.pop("device_mesh", None)
        kwargs.pop("device", None)
        move_module(self, given)
        rest = args[1:]
        return to(self, *rest, **kwargs) if rest or kwargs else self

    to_mesh_or.takes_mesh = True  # type: ignore[attr-defined]
    return to_mesh_or


def install() -> None:
    """Let ``torch.nn.Module.to`` take a DeviceMesh; for all else it stays torch's."""
    if not getattr(Module.to, "takes_mesh", False):
        Module.to = _to_with_mesh(Module.to)  # type: ignore[method-assign]
