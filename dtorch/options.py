"""What every factory takes beside its own arguments: where its tensor lies, its dtype, whether it requires grad."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import graph
from ._tensor import Tensor, choose_mesh
from .mesh import DeviceMesh
from .placement import Partial, Replicate, Shard
from .runtime import moves
from .runtime.make import make
from .spec import resolve

__all__ = ["OPTIONS", "Where", "default_dtype", "sizes"]

# What a factory of torch that knows no meshes is not told.
OPTIONS = ("device", "device_mesh", "graph", "placements", "requires_grad", "layout", "pin_memory", "out")


class Where:
    """The options of one call of a factory, read and checked once."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        mesh = choose_mesh(options.pop("device", None), options.pop("device_mesh", None), options.pop("graph", None))
        self.mesh = mesh
        self.placements: Sequence[Any] | None = options.pop("placements", None)
        self.guarded = self.placements is None
        if self.guarded:
            self.placements = graph.routed_placements()
        self.dtype: torch.dtype | None = options.pop("dtype", None)
        self.requires_grad: bool = options.pop("requires_grad", False)
        self.generator: torch.Generator | None = options.pop("generator", None)
        self.out: Tensor | None = options.pop("out", None)
        layout = options.pop("layout", None) or torch.strided
        if layout is not torch.strided:
            raise TypeError(f"{name}(layout={layout}): dtorch tensors are strided")
        options.pop("pin_memory", None)
        options.pop("memory_format", None)
        options.pop("names", None)
        if options:
            raise TypeError(f"{name}() got an unexpected keyword argument {next(iter(options))!r}")

    def resolved(self, ndim: int) -> tuple[DeviceMesh, tuple[Any, ...]]:
        """The mesh, and the placements of a tensor of `ndim` dims."""
        placements = self.placements
        if self.guarded and placements is not None:
            placements = [p if not isinstance(p, Shard) or -ndim <= p.dim < ndim else Replicate() for p in placements]
        return resolve(self.mesh, placements, ndim)

    def finish(self, made: Tensor) -> Tensor:
        """`made`, written to ``out=`` or told to require grad as asked."""
        if self.out is not None:
            return self.out.copy_(made)  # type: ignore[return-value]
        return made.requires_grad_() if self.requires_grad else made

    def make(self, func: Any, ndim: int, *args: Any, **kwargs: Any) -> Tensor:
        """What the operator `func` makes, each rank its piece."""
        mesh, placements = self.resolved(ndim)
        if any(isinstance(p, Partial) for p in placements):
            # The value is made whole, then one rank of each dim keeps it: no rule has to know of it.
            whole = tuple(Replicate() if isinstance(p, Partial) else p for p in placements)
            return self.finish(moves.redistribute(make(func, args, kwargs, mesh, whole), mesh, placements))
        return self.finish(make(func, args, kwargs, mesh, placements))

    def lift(self, plain: torch.Tensor) -> Tensor:
        """A copy of `plain`."""
        return self.finish(moves.lift(plain, *self.resolved(plain.ndim)))

    def own(self, torch_function: Callable[..., torch.Tensor], *args: Any) -> Tensor:
        """With the caller's own generator: drawn here, then sent."""
        return self.lift(torch_function(*args, generator=self.generator, dtype=self.dtype))


def sizes(given: tuple[Any, ...], options: dict[str, Any]) -> list[int]:
    """Sizes given as arguments, as one sequence, or as ``size=``."""
    if not given and "size" in options:
        given = (options.pop("size"),)
    if len(given) == 1 and not isinstance(given[0], int) and hasattr(given[0], "__iter__"):
        given = tuple(given[0])
    return [int(s) for s in given]


def default_dtype() -> torch.dtype:
    """The dtype of floating-point tensors that name none."""
    return graph.Graph.default_graph().default_dtype
