"""One call of a torch function beside the same call of dtorch's, and whether both gave the same."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

import dtorch
from dtorch import DeviceMesh, Replicate, Shard
from dtorch.graph import placements_guard
from dtorch.placement import Placement

__all__ = ["WHERE", "Maker", "Place", "Wrong", "check", "check_case", "on_mesh", "place", "plain", "same"]

# Where the arguments of a call lie.
WHERE: dict[str, tuple[int, Placement]] = {
    "one": (1, Replicate()),
    "replicated": (2, Replicate()),
    "sharded": (2, Shard(0)),
}


class Wrong(AssertionError):
    """dtorch's result is not torch's."""


@dataclasses.dataclass(frozen=True)
class Place:
    """A mesh of CPUs, and how tensors lie on it."""

    mesh: DeviceMesh
    placement: Placement


def place(where: str) -> Place:
    """The place called `where`: "one", "replicated" or "sharded"."""
    n, placement = WHERE[where]
    return Place(dtorch.init_device_mesh("cpu", n), placement)


def plain(value: Any) -> Any:
    """`value` with a plain, detached tensor for every dtorch tensor in it."""
    if isinstance(value, dtorch.Tensor):
        return value.detach().to_torch()
    return value


def _put(value: Any, where: Place | None) -> Any:
    """A copy of an argument; its tensors are dtorch's, at `where`, or plain ones where that is None."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.is_nested:
            return value
        if where is None:
            return value.detach().clone().requires_grad_(value.requires_grad)
        placement = where.placement if value.ndim else Replicate()
        # Memory order, conjugate bits and gradients come along.
        made = dtorch.distribute_tensor(value.detach(), where.mesh, [placement])
        return made.requires_grad_(value.requires_grad)
    if isinstance(value, torch.Generator):
        return torch.Generator().set_state(value.get_state())
    if type(value) in (list, tuple):
        return type(value)(_put(v, where) for v in value)
    if type(value) is dict:
        return {k: _put(v, where) for k, v in value.items()}
    return value


def _leaves(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_leaves(v) for v in value]
    if isinstance(value, Mapping):
        return [[k, _leaves(v)] for k, v in value.items()]
    return plain(value)


def same(ours: Any, theirs: Any, values: bool = True) -> None:
    """Raise :class:`Wrong` where two results differ; with `values` false, look at shapes and dtypes only."""
    ours, theirs = _leaves(ours), _leaves(theirs)
    if isinstance(theirs, list):
        if not isinstance(ours, list) or len(ours) != len(theirs):
            raise Wrong(f"{ours!r} for {theirs!r}")
        for a, b in zip(ours, theirs, strict=True):
            same(a, b, values)
    elif isinstance(theirs, torch.Tensor):
        if not isinstance(ours, torch.Tensor):
            raise Wrong(f"{type(ours)} for a tensor")
        if ours.dtype is not theirs.dtype or ours.shape != theirs.shape or ours.layout is not theirs.layout:
            raise Wrong(f"{ours.dtype} {tuple(ours.shape)} for {theirs.dtype} {tuple(theirs.shape)}")
        if values:
            try:
                rtol, atol = (2e-4, 2e-5) if theirs.dtype.itemsize > 2 else (2e-2, 1e-2)
                torch.testing.assert_close(
                    ours.detach().resolve_conj(), theirs.detach().resolve_conj(), equal_nan=True, rtol=rtol, atol=atol
                )
            except AssertionError as e:
                raise Wrong(str(e).partition("\n\n")[0] + f"\n{ours}\nfor\n{theirs}") from None
    elif isinstance(theirs, np.ndarray):
        if ours.dtype != theirs.dtype or not np.allclose(ours, theirs, equal_nan=True):
            raise Wrong(f"{ours!r} for {theirs!r}")
    elif isinstance(theirs, float):
        if not (math.isclose(ours, theirs, rel_tol=1e-4, abs_tol=1e-5) or (math.isnan(theirs) and math.isnan(ours))):
            raise Wrong(f"{ours!r} for {theirs!r}")
    elif isinstance(theirs, (int, str, bool, complex, torch.dtype, torch.layout, type(None))) and ours != theirs:
        raise Wrong(f"{ours!r} for {theirs!r}")


def _written(ours: Any, theirs: Any) -> tuple[list[Any], list[Any]]:
    """The tensors among two calls' arguments that either call wrote, by autograd's count."""
    pairs: list[tuple[Any, Any]] = []

    def walk(a: Any, b: Any) -> None:
        if isinstance(b, torch.Tensor):
            if a._version or b._version:
                pairs.append((a, b))
        elif isinstance(b, (list, tuple)):
            for x, y in zip(a, b, strict=True):
                walk(x, y)
        elif isinstance(b, dict):
            walk(list(a.values()), list(b.values()))

    walk(ours, theirs)
    return [a for a, _ in pairs], [b for _, b in pairs]


def on_mesh(ours: Any, theirs: Any) -> None:
    """Raise :class:`Wrong` where torch gives a tensor and dtorch one that lies on no mesh."""
    if isinstance(theirs, torch.Tensor):
        if not isinstance(ours, dtorch.Tensor):
            raise Wrong("a plain tensor, on no mesh")
    elif isinstance(theirs, (list, tuple)):
        for a, b in zip(ours, theirs, strict=True):
            on_mesh(a, b)


def check(
    ours: Callable[..., Any],
    theirs: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    where: Place,
    *,
    values: bool = True,
    lies: bool = True,
) -> bool:
    """Call both with copies of the same arguments; compare what comes back, and what became of the arguments.

    Args:
        values: compare values, not only shapes and dtypes.
        lies: dtorch's result must lie on a mesh.

    Returns:
        Whether there was something to compare: torch itself did not raise, nor give its target another size.

    Raises:
        Wrong: the results or the written arguments differ, or only torch raised.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted_args, wanted_kwargs = _put(args, None), _put(kwargs, None)
        dtorch.manual_seed(5)
        try:
            wanted = theirs(*wanted_args, **wanted_kwargs)
        except Exception as e:
            wanted = e
        if isinstance(args[0], torch.Tensor) and wanted_args[0].numel() != args[0].numel():
            return False
        got_args, got_kwargs = _put(args, where), _put(kwargs, where)
        dtorch.manual_seed(5)
        with _inside(where):
            if isinstance(wanted, Exception):
                try:
                    got = ours(*got_args, **got_kwargs)
                    _leaves(got)
                except Exception:
                    return False
                raise Wrong(f"gave {got!r} where torch raises {wanted!r}")
            got = ours(*got_args, **got_kwargs)
            same(got, wanted, values)
            if lies:
                on_mesh(got, wanted)
            same(*_written([got_args, got_kwargs], [wanted_args, wanted_kwargs]), values)
    return True


@contextlib.contextmanager
def _inside(where: Place) -> Iterator[None]:
    """What is made inside lies at `where`, and what has to move moves."""
    with dtorch.device_mesh(where.mesh), placements_guard([where.placement]), dtorch.auto_redistribute():
        yield


class Maker:
    """Makes the tensors of a hand-written case: the same numbers for both sides.

    Attributes:
        made: all it made, to compare what a call wrote.
    """

    def __init__(self, where: Place | None) -> None:
        self.where, self.made = where, []
        self._random = torch.Generator().manual_seed(3)

    def of(self, value: torch.Tensor) -> Any:
        """`value`, a plain tensor, where this maker's tensors lie; a dtorch one as it is."""
        made = value if isinstance(value, dtorch.Tensor) else _put(value, self.where)
        self.made.append(made)
        return made

    def __call__(self, *shape: int) -> Any:
        return self.of(torch.empty(shape).normal_(generator=self._random))

    def positive(self, *shape: int) -> Any:
        """Floats between 0.1 and 0.9."""
        return self.of(torch.empty(shape).uniform_(0.1, 0.9, generator=self._random))

    def i(self, *shape: int, high: int = 5) -> Any:
        """Integers of [0, high)."""
        return self.of(torch.empty(shape, dtype=torch.int64).random_(high, generator=self._random))

    def sign(self, *shape: int) -> Any:
        """Floats, 1 or -1."""
        return self.of(torch.empty(shape).bernoulli_(0.5, generator=self._random) * 2 - 1)

    def complex(self, *shape: int) -> Any:
        """Complex floats."""
        return self.of(torch.empty(shape, dtype=torch.complex64).normal_(generator=self._random))

    def spd(self, n: int) -> Any:
        """A symmetric positive definite matrix."""
        a = torch.empty(n, n).normal_(generator=self._random)
        return self.of(a @ a.T + n * torch.eye(n))


def check_case(case: Callable[[Any, Any], Any], where: Place, lies: bool = True) -> None:
    """Run a hand-written case in torch's namespace and in dtorch's; raise :class:`Wrong` where they differ."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs, ours = Maker(None), Maker(where)
        dtorch.manual_seed(5)
        wanted = case(torch, theirs)
        dtorch.manual_seed(5)
        with _inside(where):
            got = case(dtorch, ours)
            same(got, wanted)
            if lies:
                on_mesh(got, wanted)
            same(*_written(ours.made, theirs.made))
