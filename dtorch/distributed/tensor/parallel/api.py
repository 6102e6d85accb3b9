"""parallelize_module: a plan of styles, applied to the modules that it names."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch.nn import Module, Parameter

from .... import graph
from ....errors import DeviceMeshError
from ....mesh import DeviceMesh
from ....nn.placing import replicate_rest
from .style import ParallelStyle

__all__ = ["parallelize_module"]

Plan = ParallelStyle | Mapping[str, ParallelStyle] | None


def parallelize_module(
    module: Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: Plan = None,
    *,
    src_data_rank: int | None = 0,
) -> Module:
    """Parallelise `module` in place: each submodule that the plan names by its style, the rest replicated.

    Args:
        module: the model. Parameters that are shared stay shared. Make the optimizer afterwards.
        device_mesh: a mesh of one dim, usually a slice such as ``mesh["tp"]``: that dim changes, what lies on the
            others stays. None is the default mesh.
        parallelize_plan: a style for `module` itself, or a style for each name; a name may hold wildcards a level
            (``"layers.*.mlp.up"``), and "" is `module` itself.
        src_data_rank: accepted as torch's; there is one source of values, the client.

    Returns:
        `module`.

    Raises:
        DeviceMeshError: the mesh has several dims; slice it.
        ValueError: the plan gives two places to one parameter that two modules share.
    """
    mesh = device_mesh or graph.default_device_mesh()
    if mesh.ndim != 1:
        names = mesh.dim_names or ("tp",)
        raise DeviceMeshError(
            f"parallelize_module: {mesh!r} has {mesh.ndim} dims, a plan is about one; write mesh[{names[-1]!r}]"
        )
    if parallelize_plan is None:
        warnings.warn("parallelize_module: no parallelize_plan, so nothing is parallelised", stacklevel=2)
        return module
    shared = _SharedParameters(module)
    for style, target in _targets(module, parallelize_plan):
        style.src_data_rank = src_data_rank
        style._apply(target, mesh)
    shared.share_again()
    replicate_rest(module, mesh)
    return module


def _targets(module: Module, plan: Any) -> Iterator[tuple[ParallelStyle, Module]]:
    """Each style with each module that it is for, in the plan's order."""
    if isinstance(plan, ParallelStyle):
        yield plan, module
        return
    if not isinstance(plan, Mapping):
        raise TypeError(f"parallelize_plan: a style or a dict of name to style, not {type(plan).__name__}")
    names = {name: submodule for name, submodule in module.named_modules(remove_duplicate=False)}
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle):
            raise TypeError(f"parallelize_plan[{pattern!r}]: a parallel style, not {type(style).__name__}")
        found = [submodule for name, submodule in names.items() if _matches(name, pattern)]
        if not found:
            warnings.warn(
                f"parallelize_module: no submodule is called {pattern!r}; among the names are "
                f"{', '.join(list(names)[1:6])}",
                stacklevel=3,
            )
        for submodule in found:
            yield style, submodule


def _matches(name: str, pattern: str) -> bool:
    """Level by level, as torch matches: a wildcard does not span a dot."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


class _SharedParameters:
    """The parameters that several modules share, found before styles replace them one by one."""

    def __init__(self, module: Module) -> None:
        places: dict[int, list[tuple[str, Module, str]]] = {}
        self._old: dict[int, Parameter] = {}
        for prefix, submodule in module.named_modules():
            for name, p in submodule._parameters.items():
                if p is not None:
                    self._old[id(p)] = p
                    places.setdefault(id(p), []).append((f"{prefix}.{name}", submodule, name))
        self._places = {key: at for key, at in places.items() if len(at) > 1}

    def share_again(self) -> None:
        """Let all who shared a parameter share the one that replaced it."""
        for key, places in self._places.items():
            now = {name: submodule._parameters[attribute] for name, submodule, attribute in places}
            new = {name: p for name, p in now.items() if p is not None and p is not self._old[key]}
            if not new:
                continue
            (first, chosen), *others = new.items()
            for name, p in others:
                if p._spec is not chosen._spec:  # type: ignore[union-attr]
                    raise ValueError(
                        f"parallelize_module: {first} and {name} are one parameter, and the plan puts it on "
                        f"{list(chosen.placements)} and on {list(p.placements)}; give both modules styles that agree "  # type: ignore[union-attr]
                        "(an Embedding RowwiseParallel and a Linear ColwiseParallel both shard dim 0)"
                    )
            for _, submodule, attribute in places:
                submodule._parameters[attribute] = chosen
