"""torch's operator database, as the conformance levels use it: operators, their samples, and what is the same."""

from __future__ import annotations

import hashlib
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

# Before the database takes torch's factories: with a mesh in force they make dtorch tensors.
import dtorch.factories  # noqa: F401

with warnings.catch_warnings(action="ignore"):
    from torch.testing._internal.common_methods_invocations import op_db

__all__ = [
    "Sample",
    "differing",
    "gradients",
    "is_random",
    "leaves",
    "operators",
    "quiet",
    "replaced",
    "samples",
    "tensors_in",
    "unseeded",
]

# Their values are whatever the memory held: shape and dtype are what there is to compare.
UNINITIALISED = frozenset(
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided resize_ resize_as_".split()
)


def quiet() -> AbstractContextManager[Any]:
    """Without torch's warnings about its own samples (no degrees of freedom, deprecated arguments, …)."""
    return warnings.catch_warnings(action="ignore")


def name_of(op: Any) -> str:
    """The operator's name in the database, with its variant: "std.unbiased"."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


@cache
def operators() -> dict[str, Any]:
    """Every operator that supports float32 on a CPU, by name."""
    return {name_of(op): op for op in op_db if torch.float32 in op.supported_dtypes("cpu")}


def seed_of(*parts: Any) -> int:
    """The same number for the same parts, in any process."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "little")


@dataclass(frozen=True)
class Sample:
    """One call of an operator: ``op(*args, **kwargs)``.

    Attributes:
        number: its place in the database's list.
        process: picks what is differentiated out of the result (a singular vector has no gradient of its own).
    """

    number: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    process: Callable[[Any], Any]

    def tensors(self) -> list[torch.Tensor]:
        return tensors_in((self.args, self.kwargs))

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Sample:
        """The same call with other tensors."""
        args, kwargs = replaced((self.args, self.kwargs), iter([change(t) for t in self.tensors()]))
        return Sample(self.number, args, kwargs, self.process)

    def __str__(self) -> str:
        def show(x: Any) -> Any:
            return f"{str(x.dtype)[6:]}{list(x.shape)}" if isinstance(x, torch.Tensor) else x

        args = [str(tree_map(show, a)) for a in self.args]
        return f"({', '.join([*args, *(f'{k}={tree_map(show, v)}' for k, v in self.kwargs.items())])})"


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and dicts, in order."""
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def samples(op: Any, dtype: torch.dtype, cap: int | None, seed: int) -> list[Sample]:
    """At most `cap` of the operator's samples of `dtype`, chosen by `seed`; values that do not vary from run to run."""
    with quiet():
        torch.manual_seed(seed_of(name_of(op), str(dtype)))
        random.seed(0)
        found = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), 2000))
    every = [
        # A device that is named wins over the mesh in force: what is made is to be made where the other tensors lie.
        Sample(i, (s.input, *s.args), {k: v for k, v in s.kwargs.items() if k != "device"}, s.output_process_fn_grad)
        for i, s in enumerate(found)
        if all(t.layout == torch.strided for t in tensors_in((s.input, s.args, s.kwargs)))
    ]
    if cap is None or len(every) <= cap:
        return every
    # The first few of one shuffle: what a short run tries is a part of what a long one does.
    order = list(range(len(every)))
    random.Random(seed_of(seed, name_of(op), str(dtype))).shuffle(order)
    return [every[i] for i in sorted(order[:cap])]


def replaced(tree: Any, new: Iterator[Any]) -> Any:
    """`tree` with its tensors replaced, in order, by those of `new`."""
    return tree_map(lambda x: next(new) if isinstance(x, torch.Tensor) else x, tree)


def leaves(result: Any) -> list[Any]:
    """A result's tensors and numbers, in order."""
    return tree_leaves(result)


def is_random(op: Any, sample: Sample) -> bool:
    """Whether another seed gives another result."""
    outs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        outs.append(leaves(op(*sample.args, **sample.kwargs)))
    return differing(outs[0], outs[1], exact=True) is not None


def unseeded(op: Any) -> bool:
    """Whether the operator's values are whatever the memory held."""
    return op.name in UNINITIALISED


TOLERANCES = {
    # Summed in another order: a few units in the last place of the largest summand.
    torch.float32: (2e-4, 2e-5),
    torch.float64: (1e-9, 1e-9),
    torch.complex64: (2e-4, 2e-5),
    torch.complex128: (1e-9, 1e-9),
    torch.bfloat16: (3e-2, 3e-2),
    torch.float16: (4e-3, 4e-3),
    torch.complex32: (4e-3, 4e-3),
}


def differing(got: list[Any], want: list[Any], *, exact: bool = False, values: bool = True) -> str | None:
    """What is different between two lists of leaves, or None.

    Args:
        exact: bit for bit (but any NaN is like any other).
        values: False compares shapes and dtypes alone.
    """
    if len(got) != len(want):
        return f"{len(got)} results, not {len(want)}"
    for o, (a, b) in enumerate(zip(got, want, strict=True)):
        where = f"result {o}" if len(want) > 1 else "the result"
        if isinstance(b, torch.Tensor) != isinstance(a, torch.Tensor):
            return f"{where} is a {type(a).__name__}, not a {type(b).__name__}"
        if not isinstance(b, torch.Tensor):
            if not _same_number(a, b):
                return f"{where} is {a!r}, not {b!r}"
            continue
        if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
            return f"{where} is {a.dtype}{list(a.shape)}, not {b.dtype}{list(b.shape)}"
        if values and not _same_values(a.detach(), b.detach(), exact):
            return f"{where} has other values: {_furthest(a.detach(), b.detach())}"
    return None


def _same_number(a: Any, b: Any) -> bool:
    try:
        return bool(a == b or (a != a and b != b)) or torch.allclose(torch.tensor(a), torch.tensor(b), rtol=1e-4)
    except (TypeError, RuntimeError, ValueError):
        return type(a) is type(b)


def _same_values(a: torch.Tensor, b: torch.Tensor, exact: bool) -> bool:
    if a.layout != torch.strided:
        a, b = a.to_dense(), b.to_dense()
    rtol, atol = TOLERANCES.get(a.dtype, (0.0, 0.0))
    if a.dtype is torch.complex32:  # has few kernels
        a, b = a.to(torch.complex64), b.to(torch.complex64)
    if exact or not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())
    if b.numel():
        finite = b.abs()[b.abs().isfinite()]
        # Against the largest value of the result: what cancels keeps the error of its summands.
        atol *= max(1.0, float(finite.float().max())) if finite.numel() else 1.0
    return torch.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True)


def _furthest(a: torch.Tensor, b: torch.Tensor) -> str:
    if not b.numel():
        return ""
    far = (a != b) & ~((a != a) & (b != b))
    if a.is_floating_point() or a.is_complex():
        gap = torch.where(far, (a - b).abs().nan_to_num(nan=float("inf")), torch.zeros(()).to(a.real.dtype))
        at = int(gap.reshape(-1).argmax())
    else:
        at = int(far.reshape(-1).int().argmax())
    return f"{a.reshape(-1)[at].item()} for {b.reshape(-1)[at].item()}"


def gradients(
    result: Any,
    sample: Sample,
    inputs: list[torch.Tensor],
    seed: int,
    lift: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda t, weights: weights,
) -> list[Any] | None:
    """Gradients of the result's random weighted sum by `inputs`; None where nothing of it can be differentiated.

    Args:
        lift: puts a plain tensor of weights where a result lies.
    """
    outs = [t for t in tensors_in(sample.process(result)) if t.requires_grad]
    if not outs or not inputs:
        return None
    g = torch.Generator().manual_seed(seed)
    weights = []
    for t in outs:
        w = torch.randn(t.shape, generator=g, dtype=torch.float64)
        if t.is_complex():
            w = torch.complex(w, torch.randn(t.shape, generator=g, dtype=torch.float64))
        weights.append(lift(t, w.to(t.dtype)))
    return list(torch.autograd.grad(outs, inputs, weights, allow_unused=True))
