"""Reductions of equally shaped tensors in a fixed order, for every dtype.

The terms are always taken in the order given, so that the bits of a result depend on neither timing, size nor
algorithm. Sums of types narrower than 32 bits are kept in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

__all__ = ["Reducer", "reducer"]

Reducer = Callable[[Tensor, Sequence[Tensor]], None]
"""Called as (out, terms): writes the reduction of `terms` into `out`, of the same shape and dtype."""

# Whose sums are the same bit patterns as those of a type that has kernels for them.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _accumulator(dtype: torch.dtype) -> torch.dtype | None:
    """The wider type that sums of `dtype` are kept in, or None for `dtype` itself."""
    if dtype.is_floating_point and dtype.itemsize < 4:
        return torch.float32
    return torch.complex64 if dtype == torch.complex32 else None


@cache
def reducer(dtype: torch.dtype, op: str, divisor: int, terms: int) -> Reducer:
    """How `terms` tensors of `dtype` become one.

    Args:
        op: "sum", "max" or "min". Booleans sum to "any".
        divisor: what the sum is divided by; integers round down.
    """
    if op in ("max", "min"):
        return _extremes(dtype, torch.maximum if op == "max" else torch.minimum)
    wide = _accumulator(dtype)
    # Two halves are added in float32 and rounded once by the kernel itself, if it has one for the type.
    if wide is not None and not (terms == 2 and divisor == 1 and dtype in (torch.float16, torch.bfloat16)):
        return _wide_sum(wide, divisor)
    if dtype in _SIGNED and divisor == 1:
        return _viewed(_SIGNED[dtype], _sum(1))
    if dtype in _SIGNED:
        # Python's integers are exact where a kernel for unsigned division is missing.
        return _unsigned_average(divisor)
    return _sum(1 if dtype == torch.bool else divisor)


def _sum(divisor: int) -> Reducer:
    def run(out: Tensor, terms: Sequence[Tensor]) -> None:
        if len(terms) == 1:
            out.copy_(terms[0])
        else:
            torch.add(terms[0], terms[1], out=out)
            for term in terms[2:]:
                out.add_(term)
        if divisor != 1:
            if out.is_floating_point() or out.is_complex():
                out.div_(divisor)
            else:
                out.div_(divisor, rounding_mode="floor")

    return run


def _wide_sum(wide: torch.dtype, divisor: int) -> Reducer:
    def run(out: Tensor, terms: Sequence[Tensor]) -> None:
        total = terms[0].to(wide, copy=True)
        for term in terms[1:]:
            total.add_(term.to(wide))
        if divisor != 1:
            total.div_(divisor)
        out.copy_(total)

    return run


def _viewed(dtype: torch.dtype, inner: Reducer) -> Reducer:
    def run(out: Tensor, terms: Sequence[Tensor]) -> None:
        inner(out.view(dtype), [t.view(dtype) for t in terms])

    return run


def _unsigned_average(divisor: int) -> Reducer:
    def run(out: Tensor, terms: Sequence[Tensor]) -> None:
        modulus = 1 << 8 * out.element_size()
        sums = [sum(column) % modulus // divisor for column in zip(*[t.flatten().tolist() for t in terms], strict=True)]
        out.copy_(torch.tensor(sums, dtype=out.dtype).view(out.shape))

    return run


def _extremes(dtype: torch.dtype, combine: Callable[..., Tensor]) -> Reducer:
    def run(out: Tensor, terms: Sequence[Tensor]) -> None:
        if len(terms) == 1:
            out.copy_(terms[0])
        else:
            combine(terms[0], terms[1], out=out)
            for term in terms[2:]:
                combine(out, term, out=out)

    if dtype in _SIGNED or (dtype.is_floating_point and dtype.itemsize == 1):
        wide = torch.float32 if dtype.is_floating_point else torch.int64
        shift = -(1 << 63) if dtype == torch.uint64 else 0

        def run_wide(out: Tensor, terms: Sequence[Tensor]) -> None:
            # uint64 does not fit in int64, but flipping the top bit keeps the order.
            keys = [(t.view(torch.int64) ^ shift) if shift else t.to(wide) for t in terms]
            total = torch.empty_like(keys[0])
            run(total, keys)
            out.copy_((total ^ shift).view(out.dtype) if shift else total)

        return run_wide
    return run
