"""The proof of a sharding rule: cut, run piece by piece, combine, compare with the whole."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ..errors import PlacementError
from ..placement import Partial, Replicate, Shard
from ..sharding.propagate import Plan, decode, propagate, strategies
from ..sharding.register import overload_of
from ..sharding.rule import Call, Recipe, Rule, find
from .pieces import Mismatch, Placements, combine, same
from .plans import Sample, flat_outputs, make_call, mesh_of, run_plan, silently_written, whole
from .simulated import SimTensor

__all__ = ["MESHES", "check", "check_sharding", "possible"]

MESHES = ((2,), (3,), (2, 2), (2, 3), (2, 2, 2))


def check(
    sample: Sample,
    shape: Sequence[int],
    have: Sequence[Placements],
    *,
    truth: list[torch.Tensor | None] | None = None,
    seed: int = 0,
    auto: bool = False,
    call: Call | None = None,
    written: Sequence[int] = (),
) -> Plan | Recipe:
    """Prove one call; returns its plan (a Recipe is run on SimTensors). `truth` holds the inputs `written` to, last.

    Raises:
        PlacementError: not legal.
        Mismatch: legal, and wrong.
    """
    call = call or make_call(sample, shape, have)
    plan = propagate(call, auto=auto)
    truth = whole(sample, written) if truth is None else truth
    if isinstance(plan, Recipe):
        _check_recipe(sample, plan, shape, have, truth, seed, written)
        return plan
    results = run_plan(sample, plan, shape, have, seed, written)
    specs = [*plan.outs, *[call.specs[i] for i in written]]
    if len(specs) != len(truth):
        raise Mismatch(f"{len(truth) - len(written)} outputs, and the plan has {len(plan.outs)}")
    for o, want in enumerate(truth):
        spec = specs[o]
        name = f"output {o}" if o < len(plan.outs) else f"what was written to input {written[o - len(plan.outs)]}"
        if want is None or spec is None:
            if want is not None or spec is not None:
                raise Mismatch(f"{name}: {spec} for {want}")
            continue
        for rank, r in enumerate(results):
            if tuple(r[o].shape) != spec.local_shape(rank):
                raise Mismatch(f"{name} on rank {rank} is {list(r[o].shape)}, {spec} says {spec.local_shape(rank)}")
        got = combine([r[o] for r in results], spec.placements, shape)
        if not same(got, want):
            raise Mismatch(f"{name} is wrong under {list(spec.placements)}")
    return plan


def _check_recipe(
    sample: Sample, recipe: Recipe, shape: Any, have: Any, truth: Any, seed: int, written: Sequence[int]
) -> None:
    g = torch.Generator().manual_seed(seed)
    mesh, placed = mesh_of(shape), iter(have)
    args, kwargs = tree_map(
        lambda x: SimTensor.distribute(x, mesh, next(placed), g) if isinstance(x, torch.Tensor) else x,
        (sample.args, sample.kwargs),
    )
    outputs = flat_outputs(recipe.fn(sample.func, args, kwargs))
    inputs = Sample(sample.func, args, kwargs).tensors()
    got = [*outputs, *[inputs[i] for i in written]]
    for o, (a, b) in enumerate(zip(got, truth, strict=True)):
        if (a is None) != (b is None) or (a is not None and not same(a.full(), b)):  # type: ignore[attr-defined]
            raise Mismatch(f"recipe: output {o} is wrong")


def possible(sample: Sample, rule: Rule, mesh_ndim: int) -> list[list[Placements]]:
    """Placements that the rule's own strategies need, on every combination of mesh dims."""
    needs = [s.needs for s in strategies(rule)]
    return [
        [tuple(decode(needs[c][i]) for c in combo) for i in range(len(rule.ins))]
        for combo in itertools.product(range(len(needs)), repeat=mesh_ndim)
    ]


def check_sharding(
    op: Any,
    *args: Any,
    meshes: Sequence[Sequence[int]] = MESHES,
    cap: int = 24,
    seed: int = 0,
    **kwargs: Any,
) -> int:
    """Prove the rule of an operator on one call: what the rule calls legal equals plain torch.

    For every mesh and combination of placements that the rule has, and some with inputs left Replicate, the arguments
    are cut by hand (Partial into summands that differ), each rank's own call is run in this process, and the pieces of
    the outputs, and of arguments that it writes to, are put together and compared with the operator on the whole. What
    ``register_fake`` says is compared, too. No executor is started. Sizes that the mesh does not divide, and smaller
    ones than it has ranks, prove the most; so do values that are no two alike.

    Args:
        op: ``"mylib::f"``, a custom op, or an overload of ``torch.ops``.
        args, kwargs: of the call; plain tensors.
        meshes: mesh shapes.
        cap: at most so many combinations per mesh, chosen by `seed`.

    Returns:
        How many were proved.

    Raises:
        Mismatch: an AssertionError that names the mesh, the placements and the output that is wrong.
        ValueError: there is no rule, it does not fit these arguments, or the result proves nothing: all is zero, or
            nothing is returned and nothing written to.
    """
    func, rng, proved = overload_of(op), random.Random(seed), 0
    sample = Sample(func, args, kwargs)
    tensors = sample.tensors()
    call = make_call(sample, (1,), [(Replicate(),)] * len(tensors))
    written = silently_written(call)
    truth = whole(sample, written)
    _refuse_untold(sample, call, truth, written)
    for shape in meshes:
        for have in _placed(sample, shape, rng, cap):
            try:
                check(sample, shape, have, truth=truth, seed=seed, written=written)
            except PlacementError:
                continue
            except Exception as error:
                placed = ", ".join(str(list(p)) for p in have)
                raise Mismatch(f"{sample} on a mesh of {tuple(shape)}, inputs {placed}: {error}") from error
            proved += 1
    return proved


def _refuse_untold(sample: Sample, call: Call, truth: list[torch.Tensor | None], written: list[int]) -> None:
    """Raise where a call proves nothing, or where what is said of its outputs is not so."""
    if not written and all(t is None for t in truth):
        raise ValueError(f"{sample}: it returns nothing and writes to no argument, so there is nothing to prove")
    outputs, after = truth[: len(truth) - len(written)], truth[len(truth) - len(written) :]
    made = [None if t is None else (tuple(t.shape), t.dtype) for t in outputs]
    said = [None if o is None else (o.shape, o.dtype) for o in call.outs]
    if made != said:
        raise Mismatch(
            f"{sample}: it made {_shown(made)}, and its register_fake says {_shown(said)}. Correct register_fake"
        )
    before = sample.tensors()
    changed = any(t is not None and not torch.equal(t, before[i]) for i, t in zip(written, after, strict=True))
    if not changed and not any(bool(t.count_nonzero()) for t in outputs if t is not None):
        what = "every output is zero or empty" if sample.func._schema.returns else "nothing that it writes to changes"
        raise ValueError(f"{sample}: {what}, which proves nothing; give other arguments")


def _shown(metas: list[tuple[tuple[int, ...], torch.dtype] | None]) -> str:
    return ", ".join("None" if m is None else f"{str(m[1])[6:]}{list(m[0])}" for m in metas) or "no tensors"


def _placed(sample: Sample, shape: Sequence[int], rng: random.Random, cap: int) -> list[list[Placements]]:
    """What to prove on a mesh: what the rule needs, and that with some inputs left Replicate."""
    n = len(shape)
    # Asked with Partial, so that rules which look for it show how it passes.
    partial = [((Replicate() if t.dtype == torch.bool else Partial()),) * n for t in sample.tensors()]
    rule = find(make_call(sample, shape, partial))
    if rule is None:
        raise ValueError(f"{sample.func} has no rule for this call: see dtorch.register_sharding")
    combos: list[list[Placements]]
    if isinstance(rule, Rule):
        combos = possible(sample, rule, n)
    else:  # a recipe takes anything
        each = [[Replicate(), Partial(), *[Shard(d) for d in range(t.ndim)]] for t in sample.tensors()]
        combos = [[(p,) * n for p in combo] for combo in itertools.product(*each)]
    if len(combos) > cap:
        combos = rng.sample(combos, cap)
    freely: list[list[Placements]] = [
        [tuple(Replicate() if rng.random() < 0.4 else p for p in ps) for ps in combo] for combo in combos
    ]
    found: list[list[Placements]] = [*combos, *freely]
    return [have for i, have in enumerate(found) if have not in found[:i]]
