"""Which combinations of placements combine although no rule allows them?

For every overload that torch's operator database reaches, every combination of Shard, Replicate and Partial is run
raw: each rank's pieces go through torch's own operator, with the global arguments. What combines to the whole, with two
shard counts and two draws of values, is possible; what is possible and refused is a missing strategy.

    python -m tests.pure.discovery            print the counts, rewrite missing_strategies.json
    python -m tests.pure.discovery --only mm  some overloads, with the samples that show each
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from dtorch.errors import PlacementError
from dtorch.placement import Partial, Placement, Replicate, Shard
from dtorch.sharding.propagate import propagate
from dtorch.sharding.rule import signature

from .database import database, dead, entries, in_child, shuffled, spread
from .harness import Mismatch, P, R, S, Sample, combine, distribute, flat_outputs, make_call, quiet, same, whole

LIST = Path(__file__).with_name("missing_strategies.json")
COUNTS = (2, 3)
KINDS = ("sum", "max")
CAP = 300
CHUNK = 8
SAMPLES = 1

Combo = tuple[Placement, ...]
Lines = list[tuple[str, str, bool, bool, str]]


# Coincidences that draws cannot tell: they hold for the samples' values alone, with a Partial.
COINCIDENT = {
    "nansum": "no sample has a nan",
    "nan_to_num": "no sample has a nan",
    "nextafter": "what it adds is within the tolerance",
    "xlogy": "0 · log 0 is 0, of summands it is nan",
    "special_xlog1py": "0 · log 0 is 0, of summands it is nan",
}


def is_telling(truth: Sequence[torch.Tensor | None]) -> bool:
    """Whether a result proves anything: zeros everywhere, one value everywhere or nothing at all do not."""

    def tells(t: torch.Tensor) -> bool:
        t = t[torch.isfinite(t)]
        return bool((t != t[0]).any()) if t.numel() > 1 else bool(((t != 0) & (t != 1)).all()) and t.numel() == 1

    return any(tells(t.reshape(-1)) for t in truth if t is not None)


def combos(sample: Sample) -> list[Combo]:
    """Combinations in which a factor may show: Shards of dims of one size, and Partial through any inputs.

    Of one or two tensors, every combination. Dims shorter than 3 are not cut: their pieces broadcast.
    """
    ts = sample.tensors()

    def kinds(t: torch.Tensor) -> list[Placement]:
        return [] if t.dtype == torch.bool else [P(k) for k in KINDS if k == "sum" or not t.is_complex()]

    found: dict[Combo, None] = {}

    def add(choices: list[list[Placement]]) -> None:
        total = 1
        for c in choices:
            total *= len(c)
        if total <= CAP:
            found.update(dict.fromkeys(itertools.product(*choices)))
        else:
            rng = random.Random(0)
            found.update(dict.fromkeys(tuple(rng.choice(c) for c in choices) for _ in range(CAP)))

    cut = [[S(d) for d, s in enumerate(t.shape) if s > 2] for t in ts]
    if len(ts) <= 2:
        add([[R, *c, *kinds(t)] for c, t in zip(cut, ts, strict=True)])
    for size in sorted({s for t in ts for s in t.shape if s > 2}):
        one = [[p for p in c if t.shape[p.dim] == size] for c, t in zip(cut, ts, strict=True)]  # type: ignore[attr-defined]
        add([[R, *c] for c in one])
        add([[*(c or [R]), *([P()] if kinds(t) else [])] for c, t in zip(one, ts, strict=True)])
    for kind in KINDS:
        add([[R, *([P(kind)] if P(kind) in kinds(t) else [])] for t in ts])
    found.pop((R,) * len(ts), None)
    return list(found)


def _pieces(sample: Sample, combo: Combo, n: int, seed: int) -> list[list[torch.Tensor | None]]:
    """What each rank's operator gives."""
    g = torch.Generator().manual_seed(seed)
    cut = [_scattered(t, p, n, g) for t, p in zip(sample.tensors(), combo, strict=True)]
    results = []
    for rank in range(n):
        source = iter([p[rank].clone(memory_format=torch.contiguous_format) for p in cut])
        args, kwargs = tree_map(
            lambda x, s=source: next(s) if isinstance(x, torch.Tensor) else x, (sample.args, sample.kwargs)
        )
        results.append(flat_outputs(sample.func(*args, **kwargs)))
    return results


def _scattered(t: torch.Tensor, p: Placement, n: int, g: torch.Generator) -> list[torch.Tensor]:
    if isinstance(p, Partial) and p.reduce_op == "max" and t.is_floating_point():
        # Far apart: a function that rises where the samples lie, and ends or falls elsewhere, does not pass.
        who = torch.randint(0, n, t.shape, generator=g)
        gap = torch.rand(t.shape, generator=g, dtype=torch.float64).to(t.dtype) * 60
        return [torch.where(who == i, t, t - gap) for i in range(n)]
    return distribute(t, (p,), (n,), g)


def _outputs(results: list[list[torch.Tensor | None]], truth: Sequence[torch.Tensor | None], n: int) -> list[set[Any]]:
    """The placements under which each output combines."""
    found = []
    for o, want in enumerate(truth):
        good: set[Placement] = set()
        if want is not None:
            for p in (R, *[S(d) for d in range(want.ndim)], *[P(k) for k in ("sum", "avg", "max", "min")]):
                try:
                    if same(combine([r[o] for r in results], (p,), (n,)), want):  # type: ignore[misc]
                        good.add(p)
                except (Mismatch, RuntimeError, IndexError, TypeError, NotImplementedError):
                    continue
        found.append(good)
    return found


def _combines(sample: Sample, combo: Combo, draws: list[tuple[Sample, list[Any]]]) -> list[set[Any]] | None:
    found: list[set[Any]] | None = None
    for n in COUNTS:
        for seed, (drawn, truth) in enumerate(draws):
            try:
                now = _outputs(_pieces(drawn, combo, n, seed), truth, n)
            except Exception:
                return None
            found = now if found is None else [a & b for a, b in zip(found, now, strict=True)]
            if not all(f for f, t in zip(found, truth, strict=True) if t is not None):
                return None
    sig = signature(sample.func)
    if found and sig.inplace and not sig.inplace_view and combo[0] not in found[0]:
        return None  # what is written stays where it is
    return found


def _best(places: set[Any]) -> Placement:
    """How one would place the output: whole, else cut, else the Partial that inputs most often are."""
    order = [
        R,
        *[p for p in sorted(places, key=str) if isinstance(p, Shard)],
        *[P(k) for k in ("sum", "avg", "max", "min")],
    ]
    return next(p for p in order if p in places)


def _ignored(sample: Sample, draws: list[tuple[Sample, list[Any]]]) -> set[int]:
    """The inputs whose values change nothing: a Partial there is a coincidence, not a strategy."""
    ts = sample.tensors()
    found = set()
    for i, t in enumerate(ts):
        combo = tuple(P() if j == i else R for j in range(len(ts)))
        if t.dtype != torch.bool and (places := _combines(sample, combo, draws)):
            if all(R in p or w is None for p, w in zip(places, draws[0][1], strict=True)):
                found.add(i)
    return found


def _raw(sample: Sample, these: list[Combo]) -> list[tuple[Combo, tuple[Placement | None, ...]]]:
    """Those of the combinations that combine, with the outputs' placements."""
    with quiet():
        draws = []
        for drawn in (sample, shuffled(sample, 1)):
            try:
                truth = whole(drawn)
            except Exception:
                continue
            if is_telling(truth):
                draws.append((drawn, truth))
        if not draws:
            return []
        ignored = _ignored(sample, draws)
        if signature(sample.func).stem in COINCIDENT:
            these = [c for c in these if not any(isinstance(p, Partial) for p in c)]
        these = [c for c in these if not any(isinstance(c[i], Partial) for i in ignored)]
        found = [(c, _combines(sample, c, draws)) for c in these]
        return [(c, tuple(_best(s) if s else None for s in f)) for c, f in found if f]


def is_allowed(sample: Sample, combo: Combo) -> bool:
    """Whether a rule allows the combination."""
    try:
        propagate(make_call(sample, (2,), [(p,) for p in combo]))
    except (PlacementError, NotImplementedError, RuntimeError):  # refused, or no meta kernel
        return False
    return True


def _show(p: Placement | None) -> str:
    if p is None:
        return "-"
    if isinstance(p, Replicate):
        return "R"
    return f"S({p.dim})" if isinstance(p, Shard) else f"P({p.reduce_op})"  # type: ignore[attr-defined]


def _is_useless(combo: Combo, outs: Sequence[Placement | None]) -> bool:
    """True, but of no use: what is Partial goes in, and nothing of it comes out."""
    given = any(isinstance(p, Partial) for p in combo)
    return given and all(isinstance(p, Replicate) or p is None for p in outs)


@dataclass
class Found:
    """What discovery learned."""

    overloads: Counter[str] = field(default_factory=Counter)
    possible: Counter[str] = field(default_factory=Counter)
    allowed: Counter[str] = field(default_factory=Counter)
    missing: dict[str, str] = field(default_factory=dict)

    def share(self) -> float:
        """Of combinations of Shard and Replicate that are possible, the share that rules allow."""
        return sum(self.allowed.values()) / max(sum(self.possible.values()), 1)

    def __str__(self) -> str:
        useless = sum(line.endswith("(useless)") for line in self.missing)
        return (
            f"{len(self.overloads)} overloads; Shard and Replicate: {sum(self.possible.values())} combinations are "
            f"possible, {sum(self.allowed.values())} allowed ({100 * self.share():.1f} %); with Partial, "
            f"{len(self.missing)} strategies are missing ({useless} of them of no use)"
        )


def _learn(name: str, sample: Sample, raw: Iterable[tuple[Combo, Any]]) -> Lines:
    """(overload, line, whether only Shard and Replicate, whether allowed, sample) of each possible combination."""
    lines = []
    for combo, outs in raw:
        only = not any(isinstance(p, Partial) for p in combo)
        line = f"{name}: {', '.join(map(_show, combo))} -> {', '.join(map(_show, outs))}"
        lines.append(
            (name, line + " (useless)" * _is_useless(combo, outs), only, is_allowed(sample, combo), str(sample))
        )
    return lines


def _work(items: list[tuple[str, Sample]]) -> list[Lines]:
    found = []
    for name, sample in items:
        wide = spread(sample, forked=False)
        found.append(_learn(name, wide, _raw(wide, combos(wide))))
    return found


def _carefully(item: tuple[str, Sample]) -> list[Lines]:
    """Of a call that killed its child: each combination that kills it is left out."""
    name, sample = item
    wide = spread(sample)
    raw = in_child(lambda these: _raw(wide, these), combos(wide), seconds=20, alone=lambda combo: _note(name, combo))
    return [_learn(name, wide, raw)]


def _note(name: str, combo: Combo) -> list[Any]:
    dead.append(f"{name}: {', '.join(map(_show, combo))}")
    return []


def discover(samples: dict[str, list[Sample]], per_overload: int = SAMPLES) -> Found:
    """Run all combinations of at most so many samples per overload."""
    found = Found()
    items = [(name, s) for name, every in samples.items() for s in _telling(every, per_overload)]
    found.overloads.update(name for name, _ in items)
    for i in range(0, len(items), CHUNK):
        for lines in in_child(_work, items[i : i + CHUNK], seconds=120, alone=_carefully):
            for name, line, only, allowed, sample in lines:
                if only:
                    found.possible[name] += 1
                    found.allowed[name] += allowed
                if not allowed:
                    found.missing[line] = sample
    return found


def _telling(samples: Iterable[Sample], most: int) -> list[Sample]:
    """The samples with the most dims to cut, each called in a way of its own."""

    def weight(s: Sample) -> tuple[int, int]:
        long = [sum(size > 1 for size in t.shape) for t in s.tensors() if t.numel()]
        short = sum(size == 1 for t in s.tensors() for size in t.shape)
        return 2 * short - sum(min(n, 3) for n in long), -sum(t.numel() for t in s.tensors())

    chosen: dict[str, Sample] = {}
    for s in sorted(samples, key=weight):
        way = str(tree_map(lambda x: x.ndim if isinstance(x, torch.Tensor) else x, (s.args, s.kwargs)))
        if any(size > 1 for t in s.tensors() for size in t.shape):
            chosen.setdefault(way, s)
    return list(chosen.values())[:most]


def committed() -> dict[str, Any]:
    """The list as it stands."""
    return json.loads(LIST.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="overloads whose names contain this")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="samples per overload")
    given = parser.parse_args()
    start = time.time()
    reached = database(name for name in entries())
    found = discover({k: v for k, v in reached.samples.items() if given.only in k}, given.samples)
    for line in sorted(found.missing):
        print(line, *([f"    {found.missing[line]}"] if given.only else []))
    print(found, file=sys.stderr)
    print(f"{len(dead)} combinations killed their child; {time.time() - start:.0f} s", file=sys.stderr)
    low = sorted((found.allowed[k] / v, k) for k, v in found.possible.items() if found.allowed[k] < v)
    for share, name in low[:60]:
        print(f"  {share:.2f} {found.allowed[name]}/{found.possible[name]} {name}", file=sys.stderr)
    if not given.only:
        content = {
            "overloads": len(found.overloads),
            "possible": sum(found.possible.values()),
            "allowed": sum(found.allowed.values()),
            "share": round(found.share(), 4),
            "missing": sorted(found.missing),
            "reached": {k: reached.entry[k] for k in found.overloads},
        }
        LIST.write_text(json.dumps(content, indent=0, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
