"""A whole dtorch in one process: recipes and small models run on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_leaves

from ..mesh import DeviceMesh
from ..placement import Placement, Replicate
from ..sharding.infer import infer
from ..sharding.propagate import propagate
from ..sharding.rule import Call, OutMeta, Recipe, signature
from ..spec import TensorSpec
from .pieces import Placements, combine, dense, distribute
from .plans import abstract, run_local

__all__ = ["SimTensor"]


def _laid_out(t: torch.Tensor | None, meta: OutMeta | None) -> torch.Tensor | None:
    """`t` in the memory order that the plan promised, as executors make sure of."""
    if t is None or meta is None or not meta.stride or t.numel() == 0 or t.stride() == tuple(meta.stride):
        return t
    return torch.empty_strided(meta.shape, meta.stride, dtype=t.dtype).copy_(t)


class SimTensor(torch.Tensor):
    """A distributed tensor whose pieces lie in a Python list. Strict, unless inside ``SimTensor.moving()``."""

    spec: TensorSpec
    pieces: list[torch.Tensor]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    auto: ClassVar[bool] = False
    counts: ClassVar[Counter[str]] = Counter()

    @staticmethod
    def of(spec: TensorSpec, pieces: list[torch.Tensor]) -> SimTensor:
        t = torch.Tensor._make_wrapper_subclass(SimTensor, spec.shape, spec.stride, dtype=spec.dtype)  # type: ignore[attr-defined]
        t.spec, t.pieces = spec, pieces
        return t

    @staticmethod
    def distribute(
        t: torch.Tensor, mesh: DeviceMesh, placements: Placements, g: torch.Generator | None = None
    ) -> SimTensor:
        g = g or torch.Generator().manual_seed(0)
        pieces = [dense(p) for p in distribute(t, placements, mesh.shape, g)]
        return SimTensor.of(TensorSpec.of(tuple(t.shape), tuple(t.stride()), t.dtype, mesh, placements), pieces)

    @staticmethod
    @contextmanager
    def moving() -> Iterator[None]:
        """Allow communication, as auto_redistribute does."""
        before, SimTensor.auto = SimTensor.auto, True
        try:
            yield
        finally:
            SimTensor.auto = before

    @property
    def placements(self) -> Placements:
        return self.spec.placements

    @property
    def device_mesh(self) -> DeviceMesh:
        return self.spec.mesh

    def full(self) -> torch.Tensor:
        return combine(self.pieces, self.spec.placements, self.spec.mesh.shape)

    def redistribute(self, *, placements: Sequence[Placement]) -> SimTensor:
        if tuple(placements) == self.placements:
            return self
        SimTensor.counts["redistribute"] += 1
        return SimTensor.distribute(self.full(), self.spec.mesh, tuple(placements))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SimTensor({self.spec})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        mesh = next(x.spec.mesh for x in leaves if isinstance(x, SimTensor))
        flat = [x for x in leaves if isinstance(x, torch.Tensor)]
        lifted = [
            x if isinstance(x, SimTensor) else SimTensor.distribute(x, mesh, (Replicate(),) * mesh.ndim) for x in flat
        ]
        a, k = abstract(func, args, kwargs, [x.spec for x in lifted])
        plan = propagate(Call(func, a, k, infer(func, a, k), mesh=mesh), auto=SimTensor.auto)
        if isinstance(plan, Recipe):
            return plan.fn(func, args, kwargs)
        for i, p in plan.moves:
            lifted[i] = lifted[i].redistribute(placements=p)
        results = [run_local(plan.calls[w], [x.pieces[r] for x in lifted]) for r, w in enumerate(plan.which)]
        if not signature(func).aliased:
            for rank, w in zip(results, plan.which, strict=True):
                rank[:] = [_laid_out(t, m) for t, m in zip(rank, plan.calls[w].outs, strict=True)]
        outs: list[Any] = [
            None if spec is None else SimTensor.of(spec, [r[o] for r in results])  # type: ignore[misc]
            for o, spec in enumerate(plan.outs)
        ]
        sig = signature(func)
        if sig.inplace:
            self = next(x for x in flat)
            if isinstance(self, SimTensor):
                self.spec, self.pieces = outs[0].spec, outs[0].pieces
                return self
        returns = func._schema.returns
        if len(returns) == 1:
            return outs if "[]" in str(returns[0].type) or "List" in str(returns[0].type) else outs[0]
        return tuple(outs) if returns else None
