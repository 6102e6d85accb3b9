"""distribute_module: a whole module onto a mesh, its inputs and outputs with it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch.nn import Module

from ... import graph
from ...mesh import DeviceMesh
from ...nn.placing import replicate_rest

__all__ = ["distribute_module"]

Partition = Callable[[str, Module, DeviceMesh], None]


def distribute_module(
    module: Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Partition | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> Module:
    """Put the parameters and buffers of `module` on `device_mesh`, in place.

    Args:
        module: the module; parameters that change place are replaced, so make the optimizer afterwards.
        device_mesh: a mesh, or a slice such as ``mesh["tp"]``, which keeps what lies on the other dims of its
            parent; None is the default mesh.
        partition_fn: ``(name, submodule, device_mesh)``, called for each submodule, shards what it wants to; what
            it leaves is replicated.
        input_fn: ``(module, inputs, device_mesh)`` prepares the positional inputs before each forward.
        output_fn: ``(module, outputs, device_mesh)`` prepares the outputs after it.

    Returns:
        `module`.
    """
    mesh = device_mesh or graph.default_device_mesh()
    if partition_fn is not None:
        for name, submodule in module.named_modules():
            partition_fn(name, submodule, mesh)
    replicate_rest(module, mesh)
    if input_fn is not None:
        prepare = _of_three("input_fn", input_fn)
        module.register_forward_pre_hook(lambda mod, inputs: prepare(mod, inputs, mesh))
    if output_fn is not None:
        finish = _of_three("output_fn", output_fn)
        module.register_forward_hook(lambda mod, _, outputs: finish(mod, outputs, mesh))
    return module


def _of_three(name: str, fn: Callable[..., Any]) -> Callable[[Module, Any, DeviceMesh], Any]:
    """`fn` of (module, values, mesh); of torch's older (values, mesh) too."""
    n = len(inspect.signature(fn).parameters)
    if n == 3:
        return fn
    if n == 2:
        return lambda _, values, mesh: fn(values, mesh)
    values = name.replace("_fn", "s")
    raise ValueError(f"distribute_module: {name} takes (module, {values}, device_mesh), this one takes {n} arguments")
