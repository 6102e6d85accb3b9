"""What the tests of traps share: layouts, and the one claim that all of them make.

The claim: strict, a call gives torch's value or raises PlacementError; under auto_redistribute it gives torch's value,
and only a write that would have to move its target is refused. What torch refuses is refused with an error of the
same type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

import dtorch
from dtorch import Partial, PlacementError, Replicate, Shard, init_device_mesh

from .programs import Program

Function = Callable[..., Any]

LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "S0": ((2,), (Shard(0),)),
    "S1": ((2,), (Shard(1),)),
    "S0 of 3": ((3,), (Shard(0),)),
    "S0,S0": ((2, 2), (Shard(0), Shard(0))),
    "S1,S0": ((2, 2), (Shard(1), Shard(0))),
    "R,S0": ((2, 2), (Replicate(), Shard(0))),
}
"""Name -> shape of the mesh, placements. A dim of 5 is uneven in all of them, and one of 1 leaves empty pieces."""


def rows(n: int = 5, m: int = 4) -> torch.Tensor:
    """0, 1, 2, … in `n` rows of `m`."""
    return torch.arange(float(n * m), dtype=torch.float64).reshape(n, m)


def mixed(n: int = 5, m: int = 4) -> torch.Tensor:
    """`n` rows of `m` numbers without order or ties, of either sign, none of them 0."""
    order = torch.randperm(n * m, generator=torch.Generator().manual_seed(n * 31 + m))
    return (order.double() - n * m / 3 + 0.25).reshape(n, m)


def place(plain: torch.Tensor, layout: str) -> dtorch.Tensor:
    """`plain` as LAYOUTS says."""
    shape, placements = LAYOUTS[layout]
    return dtorch.distribute_tensor(plain, init_device_mesh("cpu", shape), placements)


def summands(plain: torch.Tensor, mesh: dtorch.DeviceMesh, kind: str = "sum") -> dtorch.Tensor:
    """`plain` as a Partial whose ranks hold different things."""
    return Program(mesh).lay(plain, [Partial(kind)] * mesh.ndim)


def plain_of(value: Any) -> Any:
    """`value` with plain tensors in the place of dtorch's."""
    if isinstance(value, dtorch.Tensor):
        return value.detach().to_torch()
    if isinstance(value, (tuple, list)):
        return [plain_of(v) for v in value]
    return value.detach() if isinstance(value, torch.Tensor) else value


def same(ours: Any, plain: Any, tolerance: float = 1e-12) -> None:
    """Values, shapes and dtypes are equal; NaN equals NaN."""
    a, b = plain_of(ours), plain_of(plain)
    if isinstance(b, (str, bool)):
        assert a == b
    else:
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True, check_stride=False)


def held(ours: dtorch.Tensor, plain: torch.Tensor) -> None:
    """Every rank holds its part of `plain`, bit for bit. Not for a Partial."""
    for rank in range(ours._spec.mesh.nranks):
        piece = plain
        for dim, (start, length) in enumerate(ours._spec.region(rank)):
            piece = piece.narrow(dim, start, length)
        torch.testing.assert_close(ours.to_local(rank), piece, rtol=0, atol=0, equal_nan=True, check_stride=False)


def writes(error: PlacementError) -> bool:
    """Whether what was refused is a write that would have to move its target."""
    return "in place, which is never moved" in str(error)


def outcome(f: Function, *args: Any) -> Any:
    """What `f` returns, or the exception that it raises (also later, when the value is read)."""
    try:
        return plain_of(f(*args))
    except Exception as error:
        return error


def claim(f: Function, plain: Any, ours: Any, tolerance: float = 1e-12) -> bool:
    """The claim above, of ``f(ours)`` beside ``f(plain)``. Returns whether the call is legal in strict mode."""
    wanted = outcome(f, plain)
    legal = True
    for auto in (False, True):
        with dtorch.auto_redistribute(auto):
            got = outcome(f, ours)
        if isinstance(got, PlacementError) and (not auto or writes(got)):
            legal = False
        elif isinstance(wanted, Exception):
            assert isinstance(got, type(wanted)), f"torch: {wanted!r}\ndtorch: {got!r}"
        elif isinstance(got, Exception):
            raise AssertionError(f"auto_redistribute {auto}: torch gives {wanted}, dtorch {got!r}") from got
        else:
            same(got, wanted, tolerance)
    return legal


def claims(functions: dict[str, Function], pairs: Iterator[tuple[str, Any, Any]]) -> None:
    """The claim for every function and every pair; all that fail are named."""
    wrong = []
    for where, plain, ours in pairs:
        for name, f in functions.items():
            try:
                claim(f, plain, ours)
            except AssertionError as error:
                wrong.append(f"{name} on {where}: {error}")
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong)
