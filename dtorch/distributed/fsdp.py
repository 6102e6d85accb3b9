"""fully_shard: parameters, gradients and optimizer state cut over one mesh dim, whole only where they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import Module, Parameter

from .. import graph
from ..errors import DeviceMeshError
from ..mesh import DeviceMesh
from ..nn.placing import put, put_parameter, replicate_rest
from ..placement import Replicate, Shard

__all__ = ["fully_shard"]

Place = tuple[str, str]
"""A submodule's name and a parameter's name in it."""


class _Sharded:
    """The parameters of one fully_shard call, and the two hooks around the forward that needs them whole."""

    def __init__(self, mesh: DeviceMesh, places: list[list[Place]]) -> None:
        self.mesh, self.places = mesh, places
        # Forwards may nest (a module that calls itself): what each one has put aside.
        self.aside: list[list[tuple[Module, str, Parameter]]] = []

    def gather(self, module: Module, _: Any) -> None:
        """Before the forward: every parameter whole along the mesh dim, in a differentiable move."""
        aside: list[tuple[Module, str, Parameter]] = []
        self.aside.append(aside)
        for shared in self.places:
            whole: torch.Tensor | None = None
            for prefix, name in shared:
                owner = module.get_submodule(prefix)
                p = owner._parameters[name]
                assert p is not None
                aside.append((owner, name, p))
                whole = put(p, self.mesh, (Replicate(),)) if whole is None else whole
                owner._parameters[name] = whole  # type: ignore[assignment]

    def restore(self, module: Module, _: Any, outputs: Any) -> None:
        """After the forward, whether it succeeded or not: the shards again."""
        for owner, name, p in self.aside.pop():
            owner._parameters[name] = p


def fully_shard(
    module: Module,
    mesh: DeviceMesh | None = None,
    *,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[Parameter], Shard | None] | None = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    ignored_params: Iterable[Parameter] | None = None,
) -> Module:
    """Shard the parameters of `module` over a mesh dim, in place; each forward gathers them for itself.

    Call it on the blocks of a model first and on the model last, as with torch: a parameter belongs to the
    innermost call. Gradients arrive sharded (a reduce_scatter), and so the optimizer's state is.

    Args:
        module: the block or the model.
        mesh: a mesh of one dim, or a slice such as ``mesh["dp"]``; what lies on the other dims stays.
        reshard_after_forward: accepted as torch's. A module's own attributes are the shards again after its
            forward; what its backward needs of the gathered values lives until then, and is not gathered twice.
        shard_placement_fn: ``(parameter)`` → where to cut it; None and by default Shard(0). Parameters of no dims
            are replicated.
        mp_policy, offload_policy: not supported; use ``dtorch.autocast``.
        ignored_params: parameters to leave as they are.

    Returns:
        `module`.

    Raises:
        DeviceMeshError: the mesh has several dims; slice it.
        NotImplementedError: a policy was given.
    """
    if mp_policy is not None or offload_policy is not None:
        raise NotImplementedError("fully_shard: mp_policy and offload_policy are not supported; leave them out")
    target = mesh or graph.default_device_mesh()
    if target.ndim != 1:
        names = target.dim_names or ("dp",)
        raise DeviceMeshError(f"fully_shard: {target!r} has {target.ndim} dims; write mesh[{names[0]!r}]")
    ignored = {id(p) for p in ignored_params or ()}
    owned = {id(p) for submodule in module.modules() for p in getattr(submodule, "_fully_sharded", ())}
    places: dict[int, list[Place]] = {}
    parameters: dict[int, Parameter] = {}
    for prefix, submodule in module.named_modules():
        for name, p in submodule._parameters.items():
            if p is not None and id(p) not in ignored | owned:
                places.setdefault(id(p), []).append((prefix, name))
                parameters[id(p)] = p
    sharded: list[Parameter] = []
    for key, where in places.items():
        new = _shard(parameters[key], target, shard_placement_fn)
        sharded.append(new)
        for prefix, name in where:
            module.get_submodule(prefix)._parameters[name] = new
    if not ignored:
        replicate_rest(module, target)
    hooks = _Sharded(target, list(places.values()))
    module._fully_sharded = sharded  # type: ignore[assignment]
    module.register_forward_pre_hook(hooks.gather, prepend=True)
    module.register_forward_hook(hooks.restore, always_call=True)
    return module


def _shard(p: Parameter, mesh: DeviceMesh, choose: Callable[[Parameter], Shard | None] | None) -> Parameter:
    """`p` cut over `mesh`. Where a later mesh dim cuts the same tensor dim, this cut is the outer one."""
    chosen = (choose(p) if choose else None) or Shard(0)
    placement = chosen if p.ndim else Replicate()
    return put_parameter(p, mesh, (placement,))
