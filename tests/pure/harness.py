"""Prove sharding rules without processes.

The inputs are cut by hand, the plan's own local calls are run piece by piece, and the pieces are put together
and compared with torch on the whole. What is proved here is exactly what executors run.

The proof itself is :mod:`dtorch.testing`, which users have for rules of their own.

* :func:`check` proves one call on one mesh with given placements.
* :func:`sweep` proves many: for every sample and mesh, the combinations the rule calls legal.
* :mod:`.discovery` runs the other way: which combinations combine although no rule allows them?
* :class:`SimTensor` is a whole dtorch in one process: recipes and small models run on it.
"""

from __future__ import annotations

import itertools
import os
import random
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dtorch.errors import PlacementError
from dtorch.placement import Partial, Placement, Replicate, Shard
from dtorch.sharding.rule import OutMeta, Rule, find
from dtorch.testing.pieces import Mismatch, Placements, combine, distribute, same
from dtorch.testing.plans import (
    Sample,
    abstract,
    flat_outputs,
    make_call,
    mesh_of,
    resolve,
    run_local,
    run_plan,
    same_strides,
    whole,
)
from dtorch.testing.proof import MESHES, check, possible
from dtorch.testing.simulated import SimTensor

__all__ = [
    "MESHES",
    "WIDE",
    "Mismatch",
    "P",
    "Placements",
    "R",
    "Report",
    "S",
    "Sample",
    "SimTensor",
    "abstract",
    "capture",
    "check",
    "check_all",
    "combine",
    "distribute",
    "every",
    "flat_outputs",
    "make_call",
    "mesh_of",
    "meta_of",
    "possible",
    "quiet",
    "resolve",
    "run_local",
    "run_plan",
    "same",
    "some",
    "sweep",
    "whole",
]

torch.set_num_threads(1)


def quiet() -> AbstractContextManager[Any]:
    """Without torch's warnings about the samples (no degrees of freedom, deprecated arguments, …)."""
    return warnings.catch_warnings(action="ignore")


R, S, P = Replicate(), Shard, Partial
WIDE = bool(os.environ.get("DTORCH_WIDE"))
"""Set DTORCH_WIDE=1 for the long run."""


# ---- sweeps -----------------------------------------------------------------------------------------


@dataclass
class Report:
    """What a sweep did."""

    checked: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    unruled: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        lines = [f"{sum(self.checked.values())} checks of {len(self.checked)} operators, {len(self.wrong)} wrong"]
        return "\n".join([*lines, *self.wrong[:20]])


def sweep(
    samples: Iterable[Sample],
    *,
    meshes: Sequence[Sequence[int]] = MESHES,
    cap: int = 12,
    seed: int = 0,
    variants: int = 3,
) -> Report:
    """Prove what the rules call legal.

    Args:
        samples: calls.
        meshes: mesh shapes.
        cap: at most so many combinations of strategies per sample and mesh (a random choice).
        variants: each combination as the rule needs it, and with some inputs left Replicate (free moves).
    """
    report, rng = Report(), random.Random(seed)
    with quiet():
        for sample in samples:
            _sweep_one(sample, report, rng, meshes, cap, variants)
    return report


def _sweep_one(
    sample: Sample, report: Report, rng: random.Random, meshes: Sequence[Sequence[int]], cap: int, variants: int
) -> None:
    name = str(sample.func)
    try:
        truth = whole(sample)
    except Exception:
        return
    ndims: dict[int, list[list[Placements]]] = {}
    for shape in meshes:
        n = len(shape)
        if n not in ndims:
            # Asked with Partial, so that rules which look for it show how it passes.
            partial = [(R if t.dtype == torch.bool else P(),) * n for t in sample.tensors()]
            try:
                rule = find(make_call(sample, shape, partial))
            except (NotImplementedError, RuntimeError):  # no meta kernel
                rule = None
            if not isinstance(rule, Rule):
                report.unruled[name] += 1
                return
            ndims[n] = possible(sample, rule, n)
        combos = ndims[n] if len(ndims[n]) <= cap else rng.sample(ndims[n], cap)
        seen: set[str] = set()
        for combo in combos:
            for variant in range(variants):
                have = [tuple(R if variant and rng.random() < 0.4 else p for p in ps) for ps in combo]
                if str(have) in seen:
                    continue
                seen.add(str(have))
                try:
                    check(sample, shape, have, truth=truth, seed=5)
                except PlacementError:
                    continue
                except Exception as e:
                    report.wrong.append(f"{sample} on {tuple(shape)} {have}: {type(e).__name__}: {str(e)[:300]}")
                report.checked[name] += 1


def every(sample: Sample, kinds: Sequence[str] = ("sum", "max", "avg")) -> list[tuple[Placement, ...]]:
    """Every combination of Shard, Replicate and Partial on one mesh dim."""
    per = [
        [R, *[S(d) for d in range(t.ndim)], *[P(k) for k in kinds if t.dtype != torch.bool]] for t in sample.tensors()
    ]
    return list(itertools.product(*per))


def check_all(
    sample: Sample, n: int, *, kinds: Sequence[str] = ("sum", "max", "avg"), cap: int = 400
) -> tuple[int, list[str]]:
    """Prove one call on an `n`-rank mesh under every combination: (legal ones, the wrong among them)."""
    combos, wrong, legal, truth = every(sample, kinds), [], 0, whole(sample)
    if len(combos) > cap:
        combos = random.Random(0).sample(combos, cap)
    for combo in combos:
        have = [(p,) for p in combo]
        try:
            check(sample, (n,), have, truth=truth)
        except PlacementError:
            continue
        except Exception as e:
            wrong.append(f"{sample} on ({n},) {have}: {type(e).__name__}: {str(e)[:300]}")
        legal += 1
    return legal, wrong


def some(combos: Iterable[Any], most: int = 30) -> list[Any]:
    """All of them in the long run; else at most so many, chosen at random but always the same."""
    found = list(combos)
    return found if WIDE or len(found) <= most else random.Random(0).sample(found, most)


# ---- samples from torch's operator database ---------------------------------------------------------


class _Capture(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Sample] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kept = tree_map(lambda x: same_strides(x.detach()) if isinstance(x, torch.Tensor) else x, (args, kwargs or {}))
        self.calls.append(Sample(func, *kept))
        return func(*args, **(kwargs or {}))


SKIPPED = ("jiterator", "sparse")
"""Entries of op_db that need a GPU, or tensors that have no strides."""


def capture(
    wanted: Callable[[Any], bool],
    *,
    ops: Callable[[str], bool] = lambda name: True,
    cap: int = 6,
    per_op: int = 12,
    dtype: torch.dtype = torch.float64,
    numel: int = 3000,
) -> list[Sample]:
    """aten calls that op_db's samples make, forward and backward.

    Args:
        wanted: which overloads to keep.
        ops: which op_db entries to run, by name.
        cap: at most so many calls per overload.
        per_op: at most so many samples per entry and dtype.
    """
    with quiet():
        from torch.testing._internal.common_methods_invocations import op_db  # noqa: PLC0415

    pool: dict[Any, dict[str, Sample]] = defaultdict(dict)
    for op in op_db:
        if not ops(op.name) or any(k in op.name for k in SKIPPED) or dtype not in op.supported_dtypes("cpu"):
            continue
        grad = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
        with quiet():
            try:
                samples = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=grad), per_op * 5))
            except Exception:
                continue
            random.Random(0).shuffle(samples)
            for s in samples[:per_op]:
                mode = _Capture()
                try:
                    with mode:
                        out = op(s.input, *s.args, **s.kwargs)
                        outs = [o for o in tree_leaves(out) if isinstance(o, torch.Tensor) and o.requires_grad]
                        if outs:
                            torch.autograd.backward(outs, [torch.randn_like(o) for o in outs])
                except Exception:
                    pass
                for c in mode.calls:
                    ts = c.tensors()
                    if not ts or len(ts) > 14 or not wanted(c.func) or sum(t.numel() for t in ts) > numel:
                        continue
                    if max(t.ndim for t in ts) > 5 or any(t.layout != torch.strided for t in ts):
                        continue
                    key = str(c)
                    if key not in pool[c.func] and len(pool[c.func]) < cap:
                        pool[c.func][key] = c
    return [c for d in pool.values() for c in d.values()]


def meta_of(t: torch.Tensor | None) -> OutMeta | None:
    """Shape, stride and dtype of a real tensor."""
    return None if t is None else OutMeta(tuple(t.shape), tuple(t.stride()), t.dtype)
