"""Is every combination that a rule calls legal right? For every overload that torch's operator database reaches.

Each call is cut by hand and run piece by piece on 1-D, 2-D and 3-D meshes of 2 and 3 ranks, evenly, unevenly and with
empty pieces, Partials split asymmetrically; forward and backward; several dtypes and draws, integers wider than a
float's mantissa among them. Kernels run in children, which they may kill.

    python -m tests.pure.soundness              prove all; the counts go to standard output
    python -m tests.pure.soundness --only conv  some overloads
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import torch

from .database import database, dead, in_child, shuffled, with_tensors
from .discovery import is_telling
from .harness import MESHES, Report, Sample, quiet, sweep, whole

CHUNK = 8
_WIDE = (1 << 25) + 1

# Integers here are places or counts, not values.
_PLACES = ("index", "gather", "scatter", "embedding", "take", "put", "unpool", "unfold", "shift", "pow", "searchsorted")


def widened(sample: Sample) -> Sample | None:
    """`sample` with integers that float32 cannot hold, where they are values."""
    ts = sample.tensors()
    if any(t.dtype != torch.int64 for t in ts) or any(k in str(sample.func) for k in _PLACES):
        return None
    return with_tensors(sample, [t * _WIDE for t in ts])


@dataclass
class Counts:
    """What was proved."""

    seen: set[str] = field(default_factory=set)
    ruled: set[str] = field(default_factory=set)
    checks: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{len(self.seen)} overloads seen, {len(self.ruled)} of them with a rule, {sum(self.checks.values())} "
            f"checks, {len(self.wrong)} violations"
        )


def _draws(sample: Sample, seed: int) -> list[Sample]:
    """The sample, its values as they are for the first seed and in another order for the rest; and wide integers."""
    drawn = shuffled(sample, seed) if seed else sample
    wide = widened(drawn)
    found = []
    for s in (drawn, *([wide] if wide else [])):
        try:
            if is_telling(whole(s)):
                found.append(s)
        except Exception:
            continue
    return found


def _mixed(samples: list[Sample]) -> list[Sample]:
    """The samples in an order in which dtypes take turns."""
    turn: Counter[torch.dtype] = Counter()
    keyed = []
    for i, s in enumerate(samples):
        dtype = s.tensors()[0].dtype
        keyed.append((turn[dtype], i, s))
        turn[dtype] += 1
    return [s for _, _, s in sorted(keyed, key=lambda k: k[:2])]


def prove(
    samples: dict[str, list[Sample]],
    *,
    per_overload: int,
    cap: int,
    seeds: int = 1,
    meshes: tuple[tuple[int, ...], ...] = MESHES,
) -> Counts:
    """Sweep at most so many samples per overload, and of each at most `cap` combinations per mesh and seed."""
    counts = Counts(seen=set(samples))

    def work(items: list[Sample]) -> list[Report]:
        found = []
        with quiet():
            for sample in items:
                for seed in range(seeds):
                    for s in _draws(sample, seed):
                        found.append(sweep([s], meshes=meshes, cap=cap, variants=2, seed=seed))
        return found

    items = [s for every in samples.values() for s in _mixed(every)[:per_overload]]
    for i in range(0, len(items), CHUNK):
        for report in in_child(work, items[i : i + CHUNK], seconds=300):
            counts.checks.update(report.checked)
            counts.ruled.update(report.checked)
            counts.wrong += report.wrong
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="overloads whose names contain this")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    start = time.time()
    samples = {k: v for k, v in database().samples.items() if given.only in k}
    counts = prove(samples, per_overload=12, cap=12, seeds=given.seeds)
    print(counts)
    for line in [*counts.wrong, *(f"killed its child: {d}" for d in dead)]:
        print(" ", line)
    print(f"{time.time() - start:.0f} s", file=sys.stderr)
    sys.exit(bool(counts.wrong))


if __name__ == "__main__":
    main()
