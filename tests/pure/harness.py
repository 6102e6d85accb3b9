"""Prove sharding rules without processes.

The inputs are cut by hand, the plan's own local calls are run piece by piece, and the pieces are put together
and compared with torch on the whole. What is proved here is exactly what executors run.

* :func:`check` proves one call on one mesh with given placements.
* :func:`sweep` proves many: for every sample and mesh, the combinations the rule calls legal.
* :func:`discover` runs the other way: which combinations combine although no rule allows them?
* :class:`SimTensor` is a whole dtorch in one process: recipes and small models run on it.
"""

from __future__ import annotations

import itertools
import os
import pickle
import random
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dtorch.errors import PlacementError
from dtorch.executor import kernels
from dtorch.mesh import DeviceMesh, init_device_mesh
from dtorch.placement import Partial, Placement, Replicate, Shard
from dtorch.sharding.infer import infer
from dtorch.sharding.propagate import LocalCall, Plan, decode, propagate, strategies
from dtorch.sharding.rule import Call, In, Num, OutMeta, Recipe, Rule, find, free_numbers, signature
from dtorch.spec import TensorSpec, chunk_sizes

torch.set_num_threads(1)


def quiet() -> AbstractContextManager[Any]:
    """Without torch's warnings about the samples (no degrees of freedom, deprecated arguments, …)."""
    return warnings.catch_warnings(action="ignore")


Placements = tuple[Placement, ...]
R, S, P = Replicate(), Shard, Partial
MESHES = ((2,), (3,), (2, 2), (2, 3), (2, 2, 2))
WIDE = bool(os.environ.get("DTORCH_WIDE"))
"""Set DTORCH_WIDE=1 for the long run."""


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


# ---- cutting and combining by hand ------------------------------------------------------------------


def _chunk(t: torch.Tensor, dim: int, n: int) -> list[torch.Tensor]:
    return list(torch.split(t, list(chunk_sizes(t.shape[dim], n)), dim))


def _summands(t: torch.Tensor, kind: str, n: int, g: torch.Generator) -> list[torch.Tensor]:
    """`n` tensors, all different, whose `kind` is `t`."""
    if n == 1:
        return [t]
    if kind in ("sum", "avg"):
        if t.is_floating_point() or t.is_complex():
            real = t.real.dtype if t.is_complex() else t.dtype
            parts = [torch.randn(t.shape, generator=g, dtype=real).to(t.dtype) * (i + 1) for i in range(n - 1)]
        else:
            parts = [torch.randint(-5, 9, t.shape, generator=g).to(t.dtype) for _ in range(n - 1)]
        return [*parts, (t if kind == "sum" else t * n) - sum(parts)]
    who = torch.randint(0, n, t.shape, generator=g)
    if t.dtype == torch.bool:
        return [torch.where(who == i, t, torch.tensor(kind == "min")) for i in range(n)]
    sign = -1 if kind == "max" else 1

    def gap() -> torch.Tensor:
        return (torch.rand(t.shape, generator=g) * 3 + 1).to(t.dtype)

    return [torch.where(who == i, t, t + sign * gap()) for i in range(n)]


def distribute(t: torch.Tensor, placements: Placements, shape: Sequence[int], g: torch.Generator) -> list[torch.Tensor]:
    """The pieces in rank order."""
    if not shape:
        return [t]
    p, n = placements[0], shape[0]
    if isinstance(p, Shard):
        parts = _chunk(t, p.dim, n)
    elif isinstance(p, Partial):
        parts = _summands(t, p.reduce_op, n, g)
    else:
        parts = [t] * n
    return [x for part in parts for x in distribute(part, placements[1:], shape[1:], g)]


def _dense(t: torch.Tensor) -> torch.Tensor:
    """A private copy whose dims lie in the order of the original's strides, packed."""
    order = sorted(range(t.ndim), key=lambda d: (t.stride(d), t.shape[d]))
    stride, step = [0] * t.ndim, 1
    for d in order:
        stride[d] = step
        step *= max(t.shape[d], 1)
    out = torch.empty_strided(t.shape, stride, dtype=t.dtype)
    out.copy_(t)
    return out


class Mismatch(AssertionError):
    """The pieces do not combine to what torch computes on the whole."""


def combine(pieces: list[torch.Tensor], placements: Placements, shape: Sequence[int]) -> torch.Tensor:
    """The value that pieces in rank order stand for."""
    if not shape:
        return pieces[0]
    n, k, p = shape[0], len(pieces) // shape[0], placements[0]
    parts = [combine(pieces[i * k : (i + 1) * k], placements[1:], shape[1:]) for i in range(n)]
    if isinstance(p, Shard):
        want = list(chunk_sizes(sum(q.shape[p.dim] for q in parts), n))
        if [q.shape[p.dim] for q in parts] != want:
            raise Mismatch(f"pieces of dim {p.dim} are {[q.shape[p.dim] for q in parts]}, not {want}")
        return torch.cat(parts, p.dim)
    if len({q.shape for q in parts}) > 1:
        raise Mismatch(f"shapes differ under {p}: {[tuple(q.shape) for q in parts]}")
    if isinstance(p, Replicate):
        for q in parts[1:]:
            if not same(q, parts[0]):
                raise Mismatch("replicas differ")
        return parts[0]
    stack = torch.stack(parts)
    if stack.dtype == torch.bool:
        stack = stack.to(torch.uint8)
    kind = p.reduce_op  # type: ignore[attr-defined]
    if kind in ("sum", "avg"):
        out = stack.sum(0) / n if kind == "avg" else stack.sum(0)
    else:
        out = stack.amax(0) if kind == "max" else stack.amin(0)
    return out.to(parts[0].dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shapes and dtypes, values equal up to summation order."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_floating_point() or a.is_complex():
        tol = 1e-7 if a.dtype in (torch.float64, torch.complex128) else 2e-3
        return torch.allclose(a, b, rtol=tol, atol=tol, equal_nan=True)
    return torch.equal(a, b)


# ---- running plans ----------------------------------------------------------------------------------


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
        return [None if m is None else torch.empty(m.shape, dtype=m.dtype) for m in local.outs]
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


def whole(sample: Sample) -> list[torch.Tensor | None]:
    """torch on the whole, on private copies of the inputs."""
    args, kwargs = tree_map(
        lambda x: _same_strides(x) if isinstance(x, torch.Tensor) else x, (sample.args, sample.kwargs)
    )
    return [None if t is None else t.clone() for t in flat_outputs(sample.func(*args, **kwargs))]


def _same_strides(t: torch.Tensor) -> torch.Tensor:
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
    sample: Sample, plan: Plan, shape: Sequence[int], have: Sequence[Placements], seed: int
) -> list[list[Any]]:
    """Outputs of every rank. `plan.moves` are done by hand: the inputs start at the placements they need."""
    g = torch.Generator().manual_seed(seed)
    start = list(have)
    for i, p in plan.moves:
        start[i] = p
    pieces = [distribute(t, p, shape, g) for t, p in zip(sample.tensors(), start, strict=True)]
    out = []
    for rank, which in enumerate(plan.which):
        out.append(run_local(plan.calls[which], [_dense(p[rank]) for p in pieces]))
    return out


def check(
    sample: Sample,
    shape: Sequence[int],
    have: Sequence[Placements],
    *,
    truth: list[torch.Tensor | None] | None = None,
    seed: int = 0,
    auto: bool = False,
    call: Call | None = None,
) -> Plan | Recipe:
    """Prove one call; returns its plan (a Recipe is run on SimTensors).

    Raises:
        PlacementError: not legal.
        Mismatch: legal, and wrong.
    """
    call = call or make_call(sample, shape, have)
    plan = propagate(call, auto=auto)
    truth = whole(sample) if truth is None else truth
    if isinstance(plan, Recipe):
        _check_recipe(sample, plan, shape, have, truth, seed)
        return plan
    results = run_plan(sample, plan, shape, have, seed)
    for o, want in enumerate(truth):
        spec = plan.outs[o]
        if want is None or spec is None:
            if want is not None or spec is not None:
                raise Mismatch(f"output {o}: {spec} for {want}")
            continue
        for rank, r in enumerate(results):
            if tuple(r[o].shape) != spec.local_shape(rank):
                raise Mismatch(f"output {o} on rank {rank} is {list(r[o].shape)}, {spec} says {spec.local_shape(rank)}")
        got = combine([r[o] for r in results], spec.placements, shape)
        if not same(got, want):
            raise Mismatch(f"output {o} is wrong under {list(spec.placements)}")
    return plan


def _check_recipe(sample: Sample, recipe: Recipe, shape: Any, have: Any, truth: Any, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    mesh, placed = mesh_of(shape), iter(have)
    args, kwargs = tree_map(
        lambda x: SimTensor.distribute(x, mesh, next(placed), g) if isinstance(x, torch.Tensor) else x,
        (sample.args, sample.kwargs),
    )
    got = flat_outputs(recipe.fn(sample.func, args, kwargs))
    for o, (a, b) in enumerate(zip(got, truth, strict=True)):
        if (a is None) != (b is None) or (a is not None and not same(a.full(), b)):  # type: ignore[attr-defined]
            raise Mismatch(f"recipe: output {o} is wrong")


def _laid_out(t: torch.Tensor | None, meta: OutMeta | None) -> torch.Tensor | None:
    """`t` in the memory order that the plan promised, as executors make sure of."""
    if t is None or meta is None or meta.stride is None or t.numel() == 0 or t.stride() == tuple(meta.stride):
        return t
    return torch.empty_strided(meta.shape, meta.stride, dtype=t.dtype).copy_(t)


# ---- a dtorch in one process ------------------------------------------------------------------------


class SimTensor(torch.Tensor):
    """A distributed tensor whose pieces lie in a Python list. Strict, unless inside ``SimTensor.moving()``."""

    spec: TensorSpec
    pieces: list[torch.Tensor]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    auto: ClassVar[bool] = False
    counts: ClassVar[Counter[str]] = Counter()

    @staticmethod
    def of(spec: TensorSpec, pieces: list[torch.Tensor]) -> SimTensor:
        t = torch.Tensor._make_wrapper_subclass(SimTensor, spec.shape, spec.stride, dtype=spec.dtype)  # type: ignore[attr-defined]
        t.spec, t.pieces = spec, pieces
        return t

    @staticmethod
    def distribute(
        t: torch.Tensor, mesh: DeviceMesh, placements: Placements, g: torch.Generator | None = None
    ) -> SimTensor:
        g = g or torch.Generator().manual_seed(0)
        pieces = [_dense(p) for p in distribute(t, placements, mesh.shape, g)]
        return SimTensor.of(TensorSpec.of(tuple(t.shape), tuple(t.stride()), t.dtype, mesh, placements), pieces)

    @staticmethod
    @contextmanager
    def moving() -> Iterator[None]:
        """Allow communication, as auto_redistribute does."""
        before, SimTensor.auto = SimTensor.auto, True
        try:
            yield
        finally:
            SimTensor.auto = before

    @property
    def placements(self) -> Placements:
        return self.spec.placements

    @property
    def device_mesh(self) -> DeviceMesh:
        return self.spec.mesh

    def full(self) -> torch.Tensor:
        return combine(self.pieces, self.spec.placements, self.spec.mesh.shape)

    def redistribute(self, *, placements: Sequence[Placement]) -> SimTensor:
        if tuple(placements) == self.placements:
            return self
        SimTensor.counts["redistribute"] += 1
        return SimTensor.distribute(self.full(), self.spec.mesh, tuple(placements))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SimTensor({self.spec})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        mesh = next(x.spec.mesh for x in leaves if isinstance(x, SimTensor))
        flat = [x for x in leaves if isinstance(x, torch.Tensor)]
        lifted = [x if isinstance(x, SimTensor) else SimTensor.distribute(x, mesh, (R,) * mesh.ndim) for x in flat]
        a, k = abstract(func, args, kwargs, [x.spec for x in lifted])
        plan = propagate(Call(func, a, k, infer(func, a, k), mesh=mesh), auto=SimTensor.auto)
        if isinstance(plan, Recipe):
            return plan.fn(func, args, kwargs)
        for i, p in plan.moves:
            lifted[i] = lifted[i].redistribute(placements=p)
        results = [run_local(plan.calls[w], [x.pieces[r] for x in lifted]) for r, w in enumerate(plan.which)]
        if not signature(func).aliased:
            for rank, w in zip(results, plan.which, strict=True):
                rank[:] = [_laid_out(t, m) for t, m in zip(rank, plan.calls[w].outs, strict=True)]
        outs: list[Any] = [
            None if spec is None else SimTensor.of(spec, [r[o] for r in results])  # type: ignore[misc]
            for o, spec in enumerate(plan.outs)
        ]
        sig = signature(func)
        if sig.inplace:
            self = next(x for x in flat)
            if isinstance(self, SimTensor):
                self.spec, self.pieces = outs[0].spec, outs[0].pieces
                return self
        returns = func._schema.returns
        if len(returns) == 1:
            return outs if "[]" in str(returns[0].type) or "List" in str(returns[0].type) else outs[0]
        return tuple(outs) if returns else None


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


def possible(sample: Sample, rule: Rule, mesh_ndim: int) -> list[list[Placements]]:
    """Placements that the rule's own strategies need, on every combination of mesh dims."""
    needs = [s.needs for s in strategies(rule)]
    return [
        [tuple(decode(needs[c][i]) for c in combo) for i in range(len(rule.ins))]
        for combo in itertools.product(range(len(needs)), repeat=mesh_ndim)
    ]


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
        kept = tree_map(lambda x: _same_strides(x.detach()) if isinstance(x, torch.Tensor) else x, (args, kwargs or {}))
        self.calls.append(Sample(func, *kept))
        return func(*args, **(kwargs or {}))


SKIPPED = (
    "fft linalg.lu svd eig sparse stft signal to_sparse pinv lstsq householder jiterator nn.functional.ctc".split()
)  # slow to sample, and of no family here


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
        grad = op.supports_autograd and dtype.is_floating_point
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
                    if not ts or len(ts) > 8 or not wanted(c.func) or sum(t.numel() for t in ts) > numel:
                        continue
                    if max(t.ndim for t in ts) > 5 or any(t.layout != torch.strided for t in ts):
                        continue
                    key = str(c)
                    if key not in pool[c.func] and len(pool[c.func]) < cap:
                        pool[c.func][key] = c
    return [c for d in pool.values() for c in d.values()]


# ---- discovery --------------------------------------------------------------------------------------


def _combines(sample: Sample, combo: tuple[Placement, ...], n: int, truth: list[Any]) -> list[set[Placement]] | None:
    """Placements of each output under which the raw pieces combine, for two random draws."""
    found: list[set[Placement]] | None = None
    for seed in (1, 2):
        g = torch.Generator().manual_seed(seed)
        pieces = [distribute(t, (p,), (n,), g) for t, p in zip(sample.tensors(), combo, strict=True)]
        results = []
        for rank in range(n):
            source = iter([p[rank].clone(memory_format=torch.contiguous_format) for p in pieces])
            args, kwargs = tree_map(
                lambda x, s=source: next(s) if isinstance(x, torch.Tensor) else x, (sample.args, sample.kwargs)
            )
            try:
                results.append(flat_outputs(sample.func(*args, **kwargs)))
            except Exception:
                return None
        now = []
        for o, want in enumerate(truth):
            good: set[Placement] = set()
            if want is not None:
                for p in (R, *[S(d) for d in range(want.ndim)], *[P(k) for k in ("sum", "avg", "max", "min")]):
                    try:
                        if same(combine([r[o] for r in results], (p,), (n,)), want):
                            good.add(p)
                    except Exception:
                        continue
            now.append(good)
        found = now if found is None else [a & b for a, b in zip(found, now, strict=True)]
    return found if found and all(f for f, t in zip(found, truth, strict=True) if t is not None) else None


def discover(sample: Sample, *, n: int = 2, kinds: Sequence[str] = ("sum",), cap: int = 120) -> list[tuple[Any, Any]]:
    """Combinations that combine although propagate refuses them: (inputs, outputs).

    Runs in a forked child in blocks, because kernels given inconsistent pieces can kill their process.
    """
    truth = whole(sample)
    combos = [c for c in every(sample, kinds) if any(p != R for p in c)]
    if len(combos) > cap:
        combos = random.Random(0).sample(combos, cap)
    refused = []
    for combo in combos:
        try:
            propagate(make_call(sample, (n,), [(p,) for p in combo]))
        except PlacementError:
            refused.append(combo)
    return _in_child(lambda cs: [(c, f) for c in cs if (f := _combines(sample, c, n, truth))], refused)


def _in_child(work: Callable[[list[Any]], list[Any]], items: list[Any]) -> list[Any]:
    if not items:
        return []
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(r)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
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
        return []
    half = len(items) // 2
    return _in_child(work, items[:half]) + _in_child(work, items[half:])


def meta_of(t: torch.Tensor | None) -> OutMeta | None:
    """Shape, stride and dtype of a real tensor."""
    return None if t is None else OutMeta(tuple(t.shape), tuple(t.stride()), t.dtype)
