"""The three levels of conformance: what is tried of one operator, and how each try ended.

* A, a single device: every sample, forward and backward, and the other dtypes.
* B, sharded: a mesh of 4, products of Replicate and Shard over the tensor arguments, divisible or not; strict, and with
  ``auto_redistribute``.
* C, hard: Partial inputs, uneven and empty shards, two mesh dims on one tensor dim, non-contiguous inputs, gradients.

A try is *right*, *refused* (a PlacementError) or *wrong*; any other exception is wrong.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

import dtorch
from dtorch import Partial, Placement, Replicate, Shard

from ..pure.database import in_child
from ..pure.harness import combine, distribute
from .database import (
    Sample,
    differing,
    gradients,
    is_random,
    leaves,
    name_of,
    quiet,
    replaced,
    samples,
    seed_of,
    tensors_in,
    unseeded,
)

__all__ = ["LEVELS", "Limits", "Outcome", "run"]

Placements = tuple[Placement, ...]
R, S, P = Replicate(), Shard, Partial
SEED = 20


@dataclass(frozen=True)
class Limits:
    """How much of the database is tried.

    Attributes:
        samples: per operator and dtype; None is all.
        combinations: of placements, per sample.
        seed: chooses both.
    """

    samples: int | None
    combinations: int
    seed: int = 0


@dataclass
class Outcome:
    """What became of the tries of one operator at one level."""

    counts: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, list[str]] = field(default_factory=dict)

    def count(self, kind: str, reason: str = "", most: int = 3) -> None:
        """One more try that ended as `kind` says; the first few reasons of what is not right are kept."""
        self.counts[kind] += 1
        if reason:
            kept = self.reasons.setdefault(kind, [])
            if len(kept) < most:
                kept.append(reason[:500])

    def json(self) -> dict[str, Any]:
        return {"counts": dict(sorted(self.counts.items())), "reasons": self.reasons}


@dataclass
class Truth:
    """What plain torch gives for a sample."""

    result: list[Any]
    grads: list[Any] | None
    differentiable: list[int]
    values: bool


def _copies(sample: Sample, differentiable: Sequence[int]) -> list[torch.Tensor]:
    out = []
    for i, t in enumerate(sample.tensors()):
        # The sample's own strides; an expanded one keeps its overlap.
        c = t.detach().clone() if 0 not in t.stride() else t.detach()
        out.append(c.requires_grad_() if i in differentiable else c)
    return out


def _call(op: Any, sample: Sample, tensors: list[Any]) -> Any:
    args, kwargs = replaced((sample.args, sample.kwargs), iter(tensors))
    return op(*args, **kwargs)


def _truth(op: Any, sample: Sample, *, grad: bool) -> Truth | None:
    """None where torch refuses its own sample, or does not repeat it under one seed."""
    values = not unseeded(op)
    able = [i for i, t in enumerate(sample.tensors()) if grad and (t.is_floating_point() or t.is_complex())]
    runs = []
    for _ in range(2):
        torch.manual_seed(SEED)
        tensors = _copies(sample, able)
        try:
            result = _call(op, sample, tensors)
        except Exception:
            if not able:
                return None
            able = []  # some operators write where a leaf must not be written
            try:
                result = _call(op, sample, _copies(sample, able))
            except Exception:
                return None
        try:
            grads = gradients(result, sample, [tensors[i] for i in able], SEED)
        except Exception:
            grads = None
        runs.append(([_plain(x) for x in leaves(result)], grads))
    if values and differing(runs[0][0], runs[1][0]):
        return None
    grads = runs[0][1]
    if grads is not None and (runs[1][1] is None or differing(grads, runs[1][1])):
        grads = None  # torch itself does not repeat them
    return Truth(runs[0][0], grads, able, values)


def _plain(x: Any) -> Any:
    if type(x) is dtorch.Tensor:
        return x.to_torch()
    return x.detach() if isinstance(x, torch.Tensor) else x


def _try(
    op: Any,
    sample: Sample,
    truth: Truth,
    place: Callable[[int, torch.Tensor], Any],
    mesh: Any,
    *,
    auto: bool = False,
    grad: bool = False,
) -> tuple[str, str]:
    """(how it ended, why) of one call with inputs placed as `place` says."""
    able = truth.differentiable if grad and truth.grads is not None else []
    try:
        with dtorch.device_mesh(mesh), dtorch.auto_redistribute() if auto else nullcontext():
            dtorch.manual_seed(SEED)
            tensors = []
            for i, t in enumerate(sample.tensors()):
                placed = place(i, t)
                tensors.append(placed.requires_grad_() if i in able else placed)
            result = _call(op, sample, tensors)
            foreign = [x for x in tensors_in(result) if type(x) is not dtorch.Tensor]
            if foreign and any(t.layout == torch.strided for t in foreign):
                return "wrong", "the result is a plain tensor"
            got = [_plain(x) for x in leaves(result)]
            found = differing(got, truth.result, values=truth.values)
            if found:
                return "wrong", found
            if able:
                lift = lambda t, w: dtorch.distribute_tensor(w, t.device_mesh)  # noqa: E731
                grads = gradients(result, sample, [tensors[i] for i in able], SEED, lift)
                found = differing([_plain(g) for g in grads or []], truth.grads or [])
                if found:
                    return "wrong", f"gradients: {found}"
        return "right", ""
    except dtorch.PlacementError as e:
        return "refused", str(e).partition("\n")[0]
    except Exception as e:
        kind = "died" if isinstance(e, (dtorch.PoolError, dtorch.ExecutorDiedError)) else "wrong"
        return kind, f"{type(e).__name__}: {str(e)[:400]}"
    finally:
        dtorch.clear_errors()


_WIDE = {torch.float32: torch.float64, torch.complex64: torch.complex128}


def _double(t: torch.Tensor) -> torch.Tensor:
    return t.to(_WIDE.get(t.dtype, t.dtype))


def _judged(
    op: Any, sample: Sample, truth: Truth, place: Callable[[int, torch.Tensor], Any], mesh: Any, **options: Any
) -> tuple[str, str]:
    """As :func:`_try`; float32 values that are off are tried again in float64.

    Where a sample makes much of the last bits (a softmax of large numbers, a near-singular matrix), another order of
    summation shows in float32. If float64 is right to 1e-9, that was all: *rounded*, which counts as right.
    """
    ended, why = _try(op, sample, truth, place, mesh, **options)
    narrow = any(t.dtype in _WIDE for t in sample.tensors())
    if ended != "wrong" or "has other values" not in why or not narrow:
        return ended, why
    wide = sample.mapped(_double)
    exact = _truth(op, wide, grad=truth.grads is not None)
    if exact is not None and _try(op, wide, exact, place, mesh, **options)[0] == "right":
        return "rounded", why
    return ended, why


# ---- A ------------------------------------------------------------------------------------------------------------

DTYPES = (torch.int64, torch.bool, torch.bfloat16, torch.complex64)


def single(op: Any, limits: Limits) -> Outcome:
    """Every sample on one CPU device."""
    out, mesh = Outcome(), dtorch.init_device_mesh("cpu", (1,))

    def place(i: int, t: torch.Tensor) -> Any:
        return dtorch.distribute_tensor(t, mesh, [R])

    for dtype in (torch.float32, *DTYPES):
        if dtype not in op.supported_dtypes("cpu"):
            continue
        name = str(dtype)[6:]
        cap = limits.samples if dtype is torch.float32 or limits.samples is None else min(limits.samples, 20)
        try:
            chosen = samples(op, dtype, cap if dtype is torch.float32 else cap or 20, limits.seed)
        except Exception:
            continue  # the database has none of this dtype
        grad = dtype is torch.float32 and op.supports_autograd
        for s in chosen:
            truth = _truth(op, s, grad=grad)
            if truth is None:
                out.count(f"{name} skipped")
                continue
            ended, why = _judged(op, s, truth, place, mesh)
            out.count(f"{name} {ended}", why and f"{why} | {s}")
            if ended in ("right", "rounded") and truth.grads is not None:
                ended, why = _judged(op, s, truth, place, mesh, grad=True)
                out.count(f"backward {ended}", why and f"{why} | {s}")
    return out


# ---- B ------------------------------------------------------------------------------------------------------------


def _options(t: torch.Tensor) -> list[Placement]:
    return [R, *[S(d) for d in range(t.ndim)]]


def _products(options: list[list[Any]], most: int, *key: Any) -> list[tuple[Any, ...]]:
    """All products, or a random choice of `most` where there are more: the first few of one shuffle."""
    rng = random.Random(seed_of(*key))
    if math.prod(len(o) for o in options) <= 4096:
        product = list(itertools.product(*options))
        rng.shuffle(product)
        return product[:most]
    return list(dict.fromkeys(tuple(rng.choice(o) for o in options) for _ in range(most)))


def sharded(op: Any, limits: Limits) -> Outcome:
    """A mesh of 4, every product of Replicate and Shard (or a fair choice), strict and with auto_redistribute."""
    out, n = Outcome(), 4
    mesh = dtorch.init_device_mesh("cpu", (n,))
    for s in samples(op, torch.float32, limits.samples, limits.seed):
        truth = _truth(op, s, grad=False)
        if truth is None:
            out.count("skipped")
            continue
        tensors = s.tensors()
        combos = _products([_options(t) for t in tensors], limits.combinations, limits.seed, name_of(op), s.number)
        refused, right = [], []
        for combo in combos:

            def place(i: int, t: torch.Tensor, combo: Any = combo) -> Any:
                return dtorch.distribute_tensor(t, mesh, [combo[i]])

            placed = f"{s} {list(combo)}"
            ended, why = _judged(op, s, truth, place, mesh)
            out.count(f"strict {ended}", why and f"{why} | {placed}")
            if ended == "refused":
                refused.append(combo)
                ended, why = _judged(op, s, truth, place, mesh, auto=True)
            else:
                right.append(combo)
            out.count(f"auto {ended}", why and f"{why} | {placed}")
        if truth.values and tensors and not is_random(op, s):
            for c in _possible(op, s, truth, refused, n):
                out.count("possible refused", f"{s} {list(c)}")
            for _ in _possible(op, s, truth, right, n):
                out.count("possible right")
    return out


def _possible(op: Any, s: Sample, truth: Truth, combos: list[Any], n: int) -> list[Any]:
    """Which combinations torch itself proves possible: its results on the pieces make up the result on the whole.

    Runs in a child, as kernels given inconsistent pieces can kill their process.
    """
    if not all(isinstance(x, torch.Tensor) for x in truth.result):
        return []
    if not any(bool((x != 0).any()) for x in truth.result if x.layout == torch.strided):
        return []  # zeros, or nothing, combine whatever the pieces are
    return in_child(lambda cs: [c for c in cs if _combines(op, s, truth, c, n)], combos)


def _combines(op: Any, s: Sample, truth: Truth, combo: tuple[Placement, ...], n: int) -> bool:
    g = torch.Generator()
    pieces = [distribute(t, (p,), (n,), g) for t, p in zip(s.tensors(), combo, strict=True)]
    results = []
    with quiet():
        for rank in range(n):
            try:
                results.append(leaves(_call(op, s, [p[rank].clone() for p in pieces])))
            except Exception:
                return False
    for o, want in enumerate(truth.result):
        ways = [R, *[S(d) for d in range(want.ndim)], P("sum"), P("max"), P("min")]
        if not any(_makes(results, o, way, n, want) for way in ways):
            return False
    return True


def _makes(results: list[list[Any]], o: int, way: Placement, n: int, want: torch.Tensor) -> bool:
    try:
        return differing([combine([r[o] for r in results], (way,), (n,))], [want]) is None
    except Exception:
        return False


# ---- C ------------------------------------------------------------------------------------------------------------


def _hard_options(t: torch.Tensor, shape: tuple[int, ...], rng: random.Random) -> Placements:
    """Placements on a mesh, of all kinds; Partials of one kind, or sum with avg."""
    kinds = rng.choice([["sum"], ["avg"], ["max"], ["min"], ["sum", "avg"]])
    options: list[Placement] = [R, *[S(d) for d in range(t.ndim)] * 2]
    if t.dtype is not torch.bool:
        if t.is_complex():
            kinds = [k for k in kinds if k in ("sum", "avg")]
        if not (t.is_floating_point() or t.is_complex()) or any(n & (n - 1) for n in shape):
            kinds = [k for k in kinds if k != "avg"]  # an average of these would be rounded
        options += [P(k) for k in kinds]
    return tuple(rng.choice(options) for _ in shape)


def _spaced(t: torch.Tensor) -> torch.Tensor:
    """The same values, not contiguous: the dims lie in reverse order."""
    return _reversed(_reversed(t).contiguous()) if t.ndim > 1 else t


def _summands(t: torch.Tensor, kind: str, n: int, g: torch.Generator) -> list[torch.Tensor]:
    """`n` tensors that differ on every rank and whose `kind` is `t` to the last bit, in whatever order."""
    if kind in ("max", "min") or not (t.is_floating_point() or t.is_complex()):
        return distribute(t, (P(kind),), (n,), g)
    if kind == "avg":
        t = t * n  # exact: n is a power of two
    # Each element lies on a rank of its own; half of it, which is exact, on another.
    who = torch.randint(0, n, t.shape, generator=g)
    also = (who + torch.randint(1, max(n, 2), t.shape, generator=g)) % n
    # What is not finite lies on the first of them alone: no sum of others would give it.
    zero = torch.zeros((), dtype=t.dtype)
    half = torch.where(t.isfinite(), t / 2, zero)
    return [torch.where(who == r, t - half, zero) + torch.where(also == r, half, zero) for r in range(n)]


def _pieces(t: torch.Tensor, placements: Placements, shape: Sequence[int], g: torch.Generator) -> list[torch.Tensor]:
    """`t` cut by hand, in rank order."""
    if not shape:
        return [t]
    p, n = placements[0], shape[0]
    parts = _summands(t, p.reduce_op, n, g) if isinstance(p, Partial) else distribute(t, (p,), (n,), g)
    return [x for part in parts for x in _pieces(part, placements[1:], shape[1:], g)]


def hard(op: Any, limits: Limits) -> Outcome:
    """Partial, uneven, empty, twice-cut and non-contiguous inputs, on meshes of 3, 4 and 2 x 2; gradients of it all."""
    out = Outcome()
    meshes = [dtorch.init_device_mesh("cpu", shape) for shape in ((4,), (3,), (2, 2))]
    for s in samples(op, torch.float32, limits.samples, limits.seed):
        if not s.tensors():
            out.count("skipped")
            continue
        for k in range(limits.combinations):
            rng = random.Random(seed_of(limits.seed, name_of(op), s.number, k))
            mesh = meshes[k % len(meshes)]
            placed = [_hard_options(t, tuple(mesh.shape), rng) for t in s.tensors()]
            spaced = rng.random() < 0.3
            given = s.mapped(_spaced) if spaced else s
            truth = _truth(op, given, grad=op.supports_autograd)
            if truth is None:
                out.count("skipped")
                continue
            place = _placer(placed, mesh, seed_of(k), spaced)
            text = f"{s} on {tuple(mesh.shape)} {[list(p) for p in placed]}{' transposed' if spaced else ''}"
            grad = truth.grads is not None
            ended, why = _judged(op, given, truth, place, mesh, grad=grad)
            out.count(f"strict {ended}", why and f"{why} | {text}")
            if ended == "refused":
                ended, why = _judged(op, given, truth, place, mesh, auto=True, grad=grad)
            out.count(f"auto {ended}", why and f"{why} | {text}")
    return out


def _reversed(t: Any) -> Any:
    return t.permute(tuple(reversed(range(t.ndim))))


def _placer(placed: list[Placements], mesh: Any, seed: int, spaced: bool) -> Callable[[int, torch.Tensor], Any]:
    shape = tuple(mesh.shape)

    def place(i: int, t: torch.Tensor) -> Any:
        if not any(isinstance(p, Partial) for p in placed[i]):
            return dtorch.distribute_tensor(t, mesh, placed[i])
        # Summands that all differ: zeros on all ranks but one would hide a reduction that is done twice.
        pieces = _pieces(t, placed[i], shape, torch.Generator().manual_seed(seed + i))
        if not spaced:
            return dtorch.from_local(pieces, mesh, placed[i], shape=t.shape)
        # Pieces are packed: they are given with the dims in reverse order, and viewed.
        turned = [S(t.ndim - 1 - p.dim) if isinstance(p, Shard) else p for p in placed[i]]
        return _reversed(dtorch.from_local([_reversed(p) for p in pieces], mesh, turned, shape=t.shape[::-1])).detach()

    return place


LEVELS: dict[str, Callable[[Any, Limits], Outcome]] = {"A": single, "B": sharded, "C": hard}


def run(level: str, op: Any, limits: Limits) -> Outcome:
    """Try one operator at one level."""
    with quiet():
        return LEVELS[level](op, limits)
