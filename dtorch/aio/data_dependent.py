"""Awaitable forms of calls whose result, or whose result's shape, is known with the values of tensors only.

Each takes what torch's function of the same name takes, returns what the blocking call returns (a dtorch tensor on
the same mesh, differentiable where torch's is), and asks for the values it needs at the call: ``await`` may come
later, and writes to the tensors after the call do not show. Only a `t` that stays where it lies, as :func:`index` and
:func:`repeat_interleave` say, is read when the values of the other arguments are there. What torch then computes of
large values runs in a helper thread, so that the loop goes on meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import anyio.to_thread
import torch

from .._tensor import Tensor
from ..future import TensorFuture
from ..runtime import modes, moves
from .collecting import gather

__all__ = [
    "allclose",
    "argwhere",
    "bincount",
    "call",
    "equal",
    "histogramdd",
    "index",
    "index_put_",
    "item",
    "masked_select",
    "nonzero",
    "numpy",
    "one_hot",
    "repeat_interleave",
    "tolist",
    "unique",
    "unique_consecutive",
    "where",
]

T = TypeVar("T")

# Elements beyond which a computation on the client is left to a helper thread, which costs a tenth of a millisecond.
_LARGE = 1 << 14


def call(function: Callable[..., T], *args: Any, **kwargs: Any) -> Coroutine[Any, Any, T]:
    """``function(*args, **kwargs)`` for whatever would wait for values: in a helper thread, under this task's modes.

    The values of the tensors among the arguments are awaited first, so that the thread is not held up by them.

        q, r = await dtorch.aio.call(torch.linalg.qr, t)
    """
    return _call(_asked(args, kwargs), function, args, kwargs, threshold=-1)


def _now(function: Callable[..., T], *args: Any, **kwargs: Any) -> Coroutine[Any, Any, T]:
    """As :func:`call`, for functions that fetch nothing but their arguments: small ones run in the loop's thread."""
    return _call(_asked(args, kwargs), function, args, kwargs, threshold=_LARGE)


def _asked(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[Any, TensorFuture[torch.Tensor]]:
    """Futures of the tensors among the arguments, by ref; asked for now."""
    found: dict[Any, TensorFuture[torch.Tensor]] = {}
    for value in (*args, *kwargs.values()):
        for t in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(t, Tensor) and t._ref not in found:
                found[t._ref] = moves.fetch(t)
    return found


async def _call(
    asked: dict[Any, TensorFuture[torch.Tensor]],
    function: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    threshold: int,
) -> T:
    values = dict(zip(asked, await gather(*asked.values()), strict=True))
    if sum(v.numel() for v in values.values()) <= threshold:
        with moves.known(values):
            return function(*args, **kwargs)
    wanted = modes.current()

    def run() -> T:
        with modes.under(wanted), moves.known(values):
            return function(*args, **kwargs)

    suspended = modes.suspend()
    try:
        return await anyio.to_thread.run_sync(run)
    finally:
        modes.resume(suspended)


def _is_mask(t: Any) -> bool:
    return isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8)


def item(t: torch.Tensor) -> Coroutine[Any, Any, Any]:
    """The value of a one-element tensor, as a Python number."""
    if t.numel() != 1:
        raise RuntimeError(f"a Tensor with {t.numel()} elements cannot be converted to Scalar")
    return _then(_plain(t), torch.Tensor.item)


def tolist(t: torch.Tensor) -> Coroutine[Any, Any, Any]:
    """The values as nested lists."""
    return _then(_plain(t), torch.Tensor.tolist)


def numpy(t: torch.Tensor, *, force: bool = False) -> Coroutine[Any, Any, Any]:
    """The values as a read-only numpy array."""
    if t.requires_grad and not force:
        raise RuntimeError("numpy() of a tensor that requires grad.\n  Write:  dtorch.aio.numpy(t.detach())")
    return _then(_plain(t), _read_only)


def _read_only(value: torch.Tensor) -> Any:
    array = value.numpy()
    array.flags.writeable = False
    return array


def _plain(t: torch.Tensor) -> TensorFuture[torch.Tensor] | torch.Tensor:
    """The value of `t`, asked for now."""
    return moves.fetch(t) if isinstance(t, Tensor) else t.detach()


async def _then(asked: TensorFuture[torch.Tensor] | torch.Tensor, make: Callable[[torch.Tensor], T]) -> T:
    return make(await asked if isinstance(asked, TensorFuture) else asked)


def nonzero(t: torch.Tensor, *, as_tuple: bool = False) -> Coroutine[Any, Any, Any]:
    """Positions of what is not zero: int64[n, ndim], or with `as_tuple` one int64[n] per dim."""
    return _now(torch.nonzero, t, as_tuple=as_tuple)


def argwhere(t: torch.Tensor) -> Coroutine[Any, Any, torch.Tensor]:
    """Positions of what is not zero, int64[n, ndim]."""
    return _now(torch.argwhere, t)


def where(condition: torch.Tensor, *choices: Any) -> Coroutine[Any, Any, Any]:
    """``torch.where``: with the condition alone positions, one int64[n] per dim; with two choices one or the other."""
    if choices:
        return _result(torch.where(condition, *choices))
    return _now(torch.where, condition)


async def _result(value: T) -> T:
    return value


def masked_select(t: torch.Tensor, mask: torch.Tensor) -> Coroutine[Any, Any, torch.Tensor]:
    """The elements of `t` where `mask` holds, in one dim."""
    return _now(torch.masked_select, t, mask)


def index(t: torch.Tensor, key: Any) -> Coroutine[Any, Any, torch.Tensor]:
    """``t[key]`` where masks are among `key`: they are awaited, and `t` stays where it lies."""
    return _index(t, *_asked_masks(key))


async def _index(t: torch.Tensor, key: Any, masks: list[TensorFuture[torch.Tensor]]) -> torch.Tensor:
    return t[await _positions(key, masks)]


def index_put_(t: torch.Tensor, key: Any, value: Any, accumulate: bool = False) -> Coroutine[Any, Any, torch.Tensor]:
    """``t[key] = value``, or ``t[key] += value`` with `accumulate`, where masks are among `key`; returns `t`.

    It writes when the masks are there.
    """
    return _index_put(t, *_asked_masks(key), value, accumulate)


async def _index_put(
    t: torch.Tensor, key: Any, masks: list[TensorFuture[torch.Tensor]], value: Any, accumulate: bool
) -> torch.Tensor:
    key = await _positions(key, masks)
    if not accumulate:
        t[key] = value
        return t
    value = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=t.dtype)
    return t.index_put_(key if isinstance(key, tuple) else (key,), value, accumulate=True)


def _asked_masks(key: Any) -> tuple[Any, list[TensorFuture[torch.Tensor]]]:
    """`key`, and the values of its masks, asked for now."""
    parts = key if isinstance(key, tuple) else (key,)
    return key, [moves.fetch(p) for p in parts if _is_mask(p)]


async def _positions(key: Any, masks: list[TensorFuture[torch.Tensor]]) -> Any:
    """`key` with the values of its masks in their place."""
    parts = key if isinstance(key, tuple) else (key,)
    values = await gather(*masks)
    found = tuple(values.pop(0) if _is_mask(p) else p for p in parts)
    return found if isinstance(key, tuple) else found[0]


def unique(
    t: torch.Tensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Coroutine[Any, Any, Any]:
    """The distinct values, or with `dim` the distinct slices; see ``torch.unique``."""
    return _now(torch.unique, t, sorted=sorted, return_inverse=return_inverse, return_counts=return_counts, dim=dim)


def unique_consecutive(
    t: torch.Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Coroutine[Any, Any, Any]:
    """The values without immediate repetitions; see ``torch.unique_consecutive``."""
    return _now(torch.unique_consecutive, t, return_inverse=return_inverse, return_counts=return_counts, dim=dim)


def bincount(
    t: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
) -> Coroutine[Any, Any, torch.Tensor]:
    """How often each number from 0 to the largest occurs, or the sum of its `weights`."""
    if weights is None:
        return _now(torch.bincount, t, minlength=minlength)
    return _now(torch.bincount, t, weights, minlength)


def histogramdd(t: torch.Tensor, bins: Any, **options: Any) -> Coroutine[Any, Any, Any]:
    """A histogram over as many dims as `t` has columns; see ``torch.histogramdd``. Bin edges lie where values lie."""
    return call(torch.histogramdd, t, bins, **options)


def repeat_interleave(
    t: torch.Tensor, repeats: torch.Tensor | int, dim: int | None = None, *, output_size: int | None = None
) -> Coroutine[Any, Any, torch.Tensor]:
    """Every element, or with `dim` every slice, as often as `repeats` says; `t` stays where it lies."""
    if not isinstance(repeats, Tensor):
        return _result(torch.repeat_interleave(t, repeats, dim, output_size=output_size))  # pyright: ignore
    return _then(moves.fetch(repeats), lambda n: torch.repeat_interleave(t, n, dim, output_size=output_size))


def one_hot(t: torch.Tensor, num_classes: int = -1) -> Coroutine[Any, Any, torch.Tensor]:
    """One-hot vectors; where `num_classes` is left out it is one more than the largest number."""
    if num_classes >= 0:
        return _result(torch.nn.functional.one_hot(t, num_classes))
    if not t.numel():
        raise RuntimeError("Class values of an empty tensor are not known; give num_classes")
    return _one_hot(t.clone(), _plain(t.min()), _plain(t.max()))


async def _one_hot(t: torch.Tensor, lowest: Any, highest: Any) -> torch.Tensor:
    lowest, highest = await gather(lowest, highest)
    if lowest < 0:
        raise RuntimeError("Class values must be non-negative.")
    return torch.nn.functional.one_hot(t, int(highest) + 1)


def equal(a: torch.Tensor, b: torch.Tensor) -> Coroutine[Any, Any, bool]:
    """Whether both have the same shape and values; compared where they lie."""
    if a.shape != b.shape:
        return _result(False)
    return _then(_plain((a == b).all()), bool)


def allclose(
    a: torch.Tensor, b: torch.Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> Coroutine[Any, Any, bool]:
    """Whether all values of both are close; compared where they lie."""
    return _then(_plain(torch.isclose(a, b, rtol, atol, equal_nan).all()), bool)
