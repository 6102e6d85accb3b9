"""Calls to prove rules with: every aten overload that torch's operator database reaches, forward and backward.

op_db's own samples have dims of five everywhere, where coincidences look like rules: :func:`spread` gives dims that
nothing ties together sizes of their own. Everything that may kill its process runs in a forked child.
"""

from __future__ import annotations

import itertools
import os
import pickle
import signal
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from dtorch.sharding.rule import signature

from .harness import R, Sample, capture, make_call, quiet, whole

__all__ = ["Database", "database", "dead", "entries", "in_child", "is_provable", "shuffled", "spread"]

DTYPES = (torch.float64, torch.int64, torch.complex128, torch.bool)
FRESH = (6, 8, 7, 9, 11, 10, 12, 13, 14)
"""Sizes for dims, which 2 ranks and 3 cut into pieces of at least 2, or of 3, 3, 1 and the like."""

# Their results hold no values of the inputs' (empty), or a shape that only the values tell, or are no tensors; what is
# sparse has no strides; as_strided addresses memory, of which a piece has its own.
_APART = frozenset(
    "empty empty_like new_empty new_empty_strided empty_permuted empty_strided nonzero masked_select _unique _unique2 "
    "unique_consecutive unique_dim _local_scalar_dense equal allclose is_same_size _to_sparse resize resize_as set "
    "as_strided as_strided_copy as_strided_scatter _linalg_check_errors repeat_interleave _sparse_coo_tensor_with_dims "
    "item linalg_eig".split()
)


def is_provable(func: torch._ops.OpOverload) -> bool:
    """Whether an operator's pieces can be compared with the whole: random ones cannot, and some hold no values."""
    sig = signature(func)
    random_ = torch.Tag.nondeterministic_seeded in func.tags
    return not (sig.has_out or random_ or sig.stem in _APART or sig.stem.startswith("sym_"))


@dataclass
class Database:
    """Samples of each overload, all from the first of op_db's entries that reaches it, which `entry` names."""

    samples: dict[str, list[Sample]]
    entry: dict[str, str]


def entries() -> list[str]:
    """The names of op_db's entries."""
    with quiet():
        from torch.testing._internal.common_methods_invocations import op_db  # noqa: PLC0415
    return list(dict.fromkeys(op.name for op in op_db))


def database(
    names: Iterable[str] | None = None,
    *,
    cap: int = 12,
    per_op: int = 12,
    numel: int = 3000,
    wanted: Callable[[Any], bool] = is_provable,
) -> Database:
    """The calls of these entries (all, unless given), of several dtypes; the overloads in order of name."""
    found: dict[str, list[Sample]] = defaultdict(list)
    entry: dict[str, str] = {}
    for name in names or entries():
        for dtype in DTYPES:
            torch.manual_seed(0)
            for s in capture(
                wanted, ops=lambda n, name=name: n == name, cap=cap, per_op=per_op, dtype=dtype, numel=numel
            ):
                if entry.setdefault(str(s.func), name) == name:
                    found[str(s.func)].append(s)
    return Database(dict(sorted(found.items())), dict(sorted(entry.items())))


# ---- children -----------------------------------------------------------------------------------------------

dead: list[str] = []
"""What killed its child, or ran out of its time."""


def in_child(
    work: Callable[[list[Any]], list[Any]],
    items: list[Any],
    *,
    seconds: int = 60,
    alone: Callable[[Any], list[Any]] | None = None,
) -> list[Any]:
    """``work(items)`` in a forked child, a list with any number of results per item.

    A child that dies, or takes longer than `seconds`, is tried again on halves. What kills it by itself is left to
    `alone`, or left out and noted in :data:`dead`.
    """
    if not items:
        return []
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(r)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        signal.alarm(seconds)
        try:
            with os.fdopen(w, "wb") as f:
                pickle.dump(work(items), f)
        finally:
            os._exit(0)
    os.close(w)
    with os.fdopen(r, "rb") as f:
        data = f.read()
    _, status = os.waitpid(pid, 0)
    if status == 0 and data:
        return pickle.loads(data)
    if len(items) == 1:
        if alone is not None:
            return alone(items[0])
        dead.append(str(items[0]))
        return []
    half = len(items) // 2
    first = in_child(work, items[:half], seconds=seconds, alone=alone)
    return first + in_child(work, items[half:], seconds=seconds, alone=alone)


# ---- distinct dims ------------------------------------------------------------------------------------------


def _resized(t: torch.Tensor, shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    """Values like those of `t`, in another shape."""
    n = 1
    for s in shape:
        n *= s
    out = t.reshape(-1)[torch.randint(0, t.numel(), (n,), generator=g)].reshape(shape)
    if out.is_floating_point() or out.is_complex():
        out = out * (torch.rand(shape, generator=g, dtype=torch.float64) * 0.2 + 0.8).to(out.dtype)
    return out


def _with_sizes(sample: Sample, sizes: dict[tuple[int, int], int]) -> Sample:
    g = torch.Generator().manual_seed(3)
    made = []
    for i, t in enumerate(sample.tensors()):
        shape = tuple(sizes.get((i, d), s) for d, s in enumerate(t.shape))
        made.append(t if shape == tuple(t.shape) else _resized(t, shape, g))
    return with_tensors(sample, made)


def with_tensors(sample: Sample, tensors: list[torch.Tensor]) -> Sample:
    """The call with other tensors."""
    source = iter(tensors)
    args, kwargs = tree_map(lambda x: next(source) if isinstance(x, torch.Tensor) else x, (sample.args, sample.kwargs))
    return Sample(sample.func, args, kwargs)


def _runs(sample: Sample) -> bool:
    try:
        whole(sample)
        make_call(sample, (2,), [(R,)] * len(sample.tensors()))
    except Exception:
        return False
    return True


def _subsets(slots: list[tuple[int, int]], most: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Subsets with the first of `slots`, small ones first, then all of them."""
    first, *rest = slots
    sizes = itertools.chain.from_iterable(itertools.combinations(rest, k) for k in range(min(len(rest), 4) + 1))
    for more in itertools.islice(sizes, most):
        yield (first, *more)
    yield tuple(slots)


def _spread(sample: Sample) -> list[torch.Tensor]:
    """Tensors of sizes such that dims have the same one only where the operator wants it."""
    ts = sample.tensors()
    alike: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for i, t in enumerate(ts):
        for d, s in enumerate(t.shape):
            if s > 1 and t.numel():
                alike[s].append((i, d))
    fresh = itertools.cycle(FRESH)
    sizes: dict[tuple[int, int], int] = {}
    with quiet():
        for slots in alike.values():
            left = list(slots)
            while left:
                size = next(fresh)
                for subset in _subsets(left, 30):
                    trial = {**sizes, **dict.fromkeys(subset, size)}
                    if _runs(_with_sizes(sample, trial)):
                        sizes = trial
                        left = [s for s in left if s not in subset]
                        break
                else:
                    left = left[1:]
    return _with_sizes(sample, sizes).tensors()


def spread(sample: Sample, *, forked: bool = True) -> Sample:
    """`sample` with dims of distinct sizes, as far as its operator takes them (tried in a child, if `forked`)."""
    if sum(t.numel() for t in sample.tensors()) == 0:
        return sample
    found = in_child(lambda items: [_spread(s) for s in items], [sample]) if forked else [_spread(sample)]
    return with_tensors(sample, found[0]) if found else sample


def shuffled(sample: Sample, seed: int) -> Sample:
    """`sample` with the values of each tensor of real or complex numbers in another order."""
    g = torch.Generator().manual_seed(seed)

    def turn(t: torch.Tensor) -> torch.Tensor:
        if not (t.is_floating_point() or t.is_complex()) or t.numel() < 2:
            return t
        return t.reshape(-1)[torch.randperm(t.numel(), generator=g)].reshape(t.shape)

    return with_tensors(sample, [turn(t) for t in sample.tensors()])
