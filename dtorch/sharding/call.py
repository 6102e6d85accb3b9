"""One operator call, as rules see it: a TensorSpec for each tensor, a Num for each number that may change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..spec import TensorSpec

if TYPE_CHECKING:
    from ..mesh import DeviceMesh
    from ..placement import Placement

__all__ = ["Call", "In", "Num", "OutMeta", "Signature", "signature"]


class OutMeta(NamedTuple):
    """Shape, stride (in elements) and dtype of one output."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Num:
    """A number whose value rides in the message.

    A rule may look at `kind` and `positive`, never at `value`, which is only an example.
    """

    kind: type
    positive: bool
    value: int | float

    @staticmethod
    def of(value: int | float) -> Num:
        return Num(type(value), value > 0, value)


@dataclass(frozen=True, slots=True)
class In:
    """Stands for input tensor `index` in the arguments of a local call."""

    index: int


class Signature:
    """What an operator's schema says, looked up once per overload."""

    __slots__ = (
        "aliased", "arguments", "defaults", "free", "has_out", "index", "inplace", "inplace_view", "op", "pointwise",
        "stem", "types", "writes", "written",
    )  # fmt: skip

    def __init__(self, func: torch._ops.OpOverload) -> None:
        schema = func._schema
        namespace, _, name = schema.name.partition("::")
        self.op = f"{namespace}.{name}.{schema.overload_name or 'default'}"
        self.arguments = tuple(a.name for a in schema.arguments)
        self.types = tuple(str(a.type) for a in schema.arguments)
        self.defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        self.index = {name: i for i, name in enumerate(self.arguments)}
        self.inplace = name.endswith("_") and not name.endswith("__")
        stem = name[:-1] if self.inplace else name
        self.stem = stem if namespace == "aten" else f"{namespace}::{stem}"
        self.has_out = any(a.is_out for a in schema.arguments)
        self.inplace_view = torch.Tag.inplace_view in func.tags
        self.pointwise = torch.Tag.pointwise in func.tags
        self.aliased = frozenset(a.name for a in schema.arguments if a.alias_info is not None)
        if self.stem in ("_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk"):
            self.aliased |= {"self"}  # views in fact, though their schemas do not say so
        self.written = frozenset(
            a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write and not a.is_out
        )
        # Which argument each output is, for outputs that are a written argument.
        written = {
            tuple(sorted(a.alias_info.before_set)): a.name
            for a in schema.arguments
            if a.alias_info is not None and a.alias_info.is_write
        }
        self.writes = tuple(
            written.get(tuple(sorted(r.alias_info.before_set))) if r.alias_info is not None else None
            for r in schema.returns
        )
        self.free: tuple[bool, ...] | None = None


@cache
def signature(func: torch._ops.OpOverload) -> Signature:
    """The signature of `func`, cached."""
    return Signature(func)


def _collect(values: Sequence[Any], out: list[TensorSpec]) -> None:
    for v in values:
        kind = type(v)
        if kind is TensorSpec:
            out.append(v)
        elif kind is list or kind is tuple:
            _collect(v, out)


class Call:
    """One operator call to be decided.

    Args:
        func: the operator.
        args, kwargs: its arguments, a TensorSpec in place of each tensor, a Num in place of each free number.
        outs: what :func:`dtorch.sharding.infer.infer` says of the outputs, flat over the returns.
        mesh: needed where no argument is a tensor; otherwise that of the tensors.
        placements: the placements asked of output 0 (factories), or None to let the rule decide.
    """

    __slots__ = ("args", "func", "kwargs", "mesh", "outs", "placements", "sig", "specs")

    def __init__(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outs: tuple[OutMeta | None, ...] = (),
        *,
        mesh: DeviceMesh | None = None,
        placements: tuple[Placement, ...] | None = None,
    ) -> None:
        specs: list[TensorSpec] = []
        _collect(args, specs)
        if kwargs:
            _collect(tuple(kwargs.values()), specs)
        self.func, self.args, self.kwargs, self.outs = func, args, kwargs, outs
        self.sig = signature(func)
        self.specs = tuple(specs)
        found = mesh or (specs[0].mesh if specs else None)
        if found is None:
            raise ValueError(f"{self.sig.op}: no argument is a tensor, so the mesh must be given")
        self.mesh: DeviceMesh = found
        self.placements = placements

    def arg(self, name: str, default: Any = None) -> Any:
        """The argument `name`: as given, else `default`, else the schema's default."""
        i = self.sig.index.get(name)
        if i is None:
            return default
        if i < len(self.args):
            return self.args[i]
        if name in self.kwargs:
            return self.kwargs[name]
        return self.sig.defaults.get(name) if default is None else default

    @property
    def stem(self) -> str:
        """The operator's name without "aten::" and without the underscore of the in-place form."""
        return self.sig.stem

    @property
    def overload(self) -> str:
        """The overload's name, "" for the default."""
        return self.func._schema.overload_name

    @property
    def inplace(self) -> int | None:
        """The index of self in `specs` for an in-place operator, else None."""
        return 0 if self.sig.inplace else None

    def owners(self) -> list[str]:
        """The name of the argument that each of `specs` came in."""
        out: list[str] = []
        for name, value in [*zip(self.sig.arguments, self.args, strict=False), *self.kwargs.items()]:
            inside: list[TensorSpec] = []
            _collect((value,), inside)
            out += [name] * len(inside)
        return out
