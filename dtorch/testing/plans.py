"""Running a plan piece by piece, as executors do, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ..executor import kernels
from ..mesh import DeviceMesh, init_device_mesh
from ..sharding.infer import infer
from ..sharding.propagate import LocalCall, Plan
from ..sharding.rule import Call, In, Num, free_numbers, signature
from ..spec import TensorSpec
from .pieces import Mismatch, Placements, dense, distribute

__all__ = [
    "Sample",
    "abstract",
    "flat_outputs",
    "make_call",
    "mesh_of",
    "resolve",
    "run_local",
    "run_plan",
    "same_strides",
    "silently_written",
    "whole",
]


@dataclass(frozen=True)
class Sample:
    """One call with real tensors."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> list[torch.Tensor]:
        return [x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, torch.Tensor)]

    def __str__(self) -> str:
        def show(x: Any) -> Any:
            return f"{str(x.dtype)[6:]}{list(x.shape)}" if isinstance(x, torch.Tensor) else x

        return f"{self.func}({', '.join(map(str, tree_map(show, self.args)))}, {tree_map(show, self.kwargs)})"


def mesh_of(shape: Sequence[int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(shape))


def resolve(op: str) -> Callable[..., Any]:
    """The function that a local call names."""
    namespace, _, rest = op.partition(".")
    if namespace == "dtorch" and hasattr(kernels, rest):
        return getattr(kernels, rest)
    name, _, overload = rest.rpartition(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def run_local(local: LocalCall, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """What an executor does for one local call."""
    if local.empty:
        return [None if m is None else torch.zeros(m.shape, dtype=m.dtype) for m in local.outs]
    moved = list(tensors)
    for i, pre in enumerate(local.pre or ()):
        if pre is None:
            continue
        for dim, start, length in pre[1]:
            moved[i] = moved[i].narrow(dim, start, length)
        if pre[0] == "zero":
            moved[i] = torch.zeros_like(moved[i])

    def fill(x: Any) -> Any:
        if isinstance(x, In):
            return moved[x.index]
        if isinstance(x, Num):
            return x.value
        return type(x)(fill(v) for v in x) if isinstance(x, (list, tuple)) else x

    result = resolve(local.func)(*[fill(a) for a in local.args], **{k: fill(v) for k, v in local.kwargs.items()})
    flat = flat_outputs(result)
    assert len(flat) == len(local.outs), f"{local.func} gave {len(flat)} outputs, not {len(local.outs)}"
    for got, meta in zip(flat, local.outs, strict=True):
        if got is not None and meta is not None and (tuple(got.shape), got.dtype) != (meta.shape, meta.dtype):
            raise Mismatch(f"{local.func} gave {got.dtype}{list(got.shape)}, the plan says {meta}")
    return flat


def flat_outputs(result: Any) -> list[torch.Tensor | None]:
    if isinstance(result, (list, tuple)):
        return [x for r in result for x in flat_outputs(r)]
    return [result] if isinstance(result, torch.Tensor) or result is None else []


def abstract(func: Any, args: Any, kwargs: Any, specs: Iterable[TensorSpec]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with specs for tensors and Num for free numbers, as dispatch makes them."""
    source, free, sig = iter(specs), free_numbers(func), signature(func)

    def swap(x: Any, number: bool) -> Any:
        if isinstance(x, torch.Tensor):
            return next(source)
        if isinstance(x, (list, tuple)):
            return type(x)(swap(v, number) for v in x)
        return Num.of(x) if number and type(x) in (int, float) else x

    return (
        tuple(swap(a, f) for a, f in zip(args, free, strict=False)),
        {k: swap(v, free[sig.index[k]]) for k, v in kwargs.items()},
    )


def make_call(sample: Sample, shape: Sequence[int], have: Sequence[Placements]) -> Call:
    """The call that dispatch would decide."""
    mesh = mesh_of(shape)
    specs = [
        TensorSpec.of(tuple(t.shape), tuple(t.stride()), t.dtype, mesh, p)
        for t, p in zip(sample.tensors(), have, strict=True)
    ]
    args, kwargs = abstract(sample.func, sample.args, sample.kwargs, specs)
    return Call(sample.func, args, kwargs, infer(sample.func, args, kwargs), mesh=mesh)


def whole(sample: Sample, written: Sequence[int] = ()) -> list[torch.Tensor | None]:
    """torch on the whole, on private copies of the inputs: its outputs, and after them the inputs `written` to."""
    args, kwargs = tree_map(
        lambda x: same_strides(x) if isinstance(x, torch.Tensor) else x, (sample.args, sample.kwargs)
    )
    flat = flat_outputs(sample.func(*args, **kwargs))
    inputs = Sample(sample.func, args, kwargs).tensors()
    return [None if t is None else t.clone() for t in [*flat, *[inputs[i] for i in written]]]


def silently_written(call: Call) -> list[int]:
    """Which tensors the call writes to without returning them."""
    returned = set(call.sig.writes)
    return [i for i, name in enumerate(call.owners()) if name in call.sig.written and name not in returned]


def same_strides(t: torch.Tensor) -> torch.Tensor:
    """A private copy with the same strides, holes and overlaps included."""
    extent = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    out = torch.empty(extent, dtype=t.dtype).as_strided(t.shape, t.stride())
    if t.numel():
        if 0 in t.stride():  # an expanded dim: write each element once
            base = out[tuple(slice(0, 1) if s == 0 else slice(None) for s in t.stride())]
            base.copy_(t[tuple(slice(0, 1) if s == 0 else slice(None) for s in t.stride())])
        else:
            out.copy_(t)
    return out


def run_plan(
    sample: Sample,
    plan: Plan,
    shape: Sequence[int],
    have: Sequence[Placements],
    seed: int,
    written: Sequence[int] = (),
) -> list[list[Any]]:
    """Outputs of every rank, and after them its pieces of the inputs `written` to.

    `plan.moves` are done by hand: the inputs start at the placements they need.
    """
    g = torch.Generator().manual_seed(seed)
    start = list(have)
    for i, p in plan.moves:
        start[i] = p
    pieces = [distribute(t, p, shape, g) for t, p in zip(sample.tensors(), start, strict=True)]
    out = []
    for rank, which in enumerate(plan.which):
        own = [dense(p[rank]) for p in pieces]
        out.append([*run_local(plan.calls[which], own), *[own[i] for i in written]])
    return out
