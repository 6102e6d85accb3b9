"""What a conformance run shows: the summary, the judgement by the expectations, and the document."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from .runner import FULL, Options

__all__ = ["failing", "judge", "summarise", "write_document"]

HERE = Path(__file__).parent
EXPECTATIONS = HERE / "expectations.json"
PEER = HERE / "torch_dtensor_2.13_op_db.csv"
DOCUMENT = HERE.parent.parent / "docs" / "conformance.md"

Line = dict[str, Any]


def failing(line: Line) -> str | None:
    """Why an operator's line is a failure, or None: a wrong value or another error anywhere, or a refusal where there
    may be none (on a single device, and with auto_redistribute)."""
    bad = [k for k in line["counts"] if k.endswith(("wrong", "died", "hung")) or k == "auto refused"]
    if line["level"] == "A":
        bad += [k for k in line["counts"] if k.endswith("refused")]
    if not bad:
        return None
    kind = min(bad, key=lambda k: (k.endswith("refused"), k))
    return f"{kind}: {(line['reasons'].get(kind) or ['?'])[0]}"


def _failing_as(line: Line, prefix: str) -> bool:
    """Whether tries whose kind begins with `prefix` ended otherwise than right, or the operator never came to them."""
    kinds = [k for k in line["counts"] if k.startswith(prefix) and k.split()[-1] not in ("right", "rounded", "skipped")]
    return bool(kinds) or any(k in ("died", "hung") for k in line["counts"])


def _total(lines: list[Line]) -> Counter[str]:
    out: Counter[str] = Counter()
    for line in lines:
        out.update(line["counts"])
    return out


class Figures:
    """The counts of one level."""

    def __init__(self, level: str, lines: list[Line]) -> None:
        self.level = level
        self.lines = [x for x in lines if x["level"] == level]
        self.counts = _total(self.lines)
        self.bad = {x["operator"]: why for x in self.lines if (why := failing(x))}
        self.right = len(self.lines) - len(self.bad)

    def without(self, prefix: str) -> int:
        """How many operators are right in all tries whose kind begins with `prefix`."""
        return sum(not _failing_as(x, prefix) for x in self.lines)

    def those(self, prefix: str) -> Figures:
        """The operators that have such tries at all."""
        return Figures(self.level, [x for x in self.lines if any(k.startswith(prefix) for k in x["counts"])])

    @property
    def coverage(self) -> float | None:
        """The share of provably possible combinations that are right in strict mode."""
        possible = self.counts["possible right"] + self.counts["possible refused"]
        return self.counts["possible right"] / possible if possible else None


def summarise(lines: list[Line]) -> str:
    """A few lines of counts per level, and every operator that failed."""
    text = []
    for level in sorted({x["level"] for x in lines}):
        f = Figures(level, lines)
        text.append(f"level {level}: {len(f.lines)} operators, {f.right} right in every try")
        text.append("  " + ", ".join(f"{k} {v:,}" for k, v in sorted(f.counts.items())))
        if level == "A":
            backward = f.those("backward")
            text.append(f"  float32 forward: {f.without('float32')} of {len(f.lines)} operators")
            text.append(f"  backward: {backward.without('backward')} of {len(backward.lines)} operators")
        if f.coverage is not None:
            text.append(f"  strict: {f.coverage:.1%} of provably possible combinations right")
        text += [f"  {name}: {why}" for name, why in f.bad.items()]
    return "\n".join(text)


def judge(lines: list[Line], options: Options, *, write: bool = False) -> int:
    """Compare with the expectations: 0, or 1 where an operator fails that they do not list, or, in a full run, where
    one passes that they do."""
    found: dict[str, dict[str, str]] = {}
    for x in lines:
        if why := failing(x):
            found.setdefault(x["level"], {})[x["operator"]] = why
    if write:
        EXPECTATIONS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        return 0
    expected: dict[str, dict[str, str]] = json.loads(EXPECTATIONS.read_text())
    status = 0
    for x in lines:
        level, name = x["level"], x["operator"]
        listed, fails = name in expected.get(level, {}), name in found.get(level, {})
        if fails and not listed:
            print(f"FAILS, level {level}: {name}: {found[level][name]}")
            status = 1
        elif listed and not fails and options.full:
            print(f"PASSES, level {level}: {name}; take it off {EXPECTATIONS.name}")
            status = 1
    return status


# ---- the document -------------------------------------------------------------------------------------------------


def _peer() -> tuple[int, int]:
    """(right, all) of torch DTensor's operators."""
    with PEER.open() as file:
        rows = list(csv.DictReader(row for row in file if not row.startswith("#")))
    return sum(r["status"] == "pass" for r in rows), len(rows)


def write_document(lines: list[Line], options: Options) -> None:
    """Write docs/conformance.md from a full run."""
    a, b, c = (Figures(level, lines) for level in "ABC")
    backward = a.those("backward")
    peer, peer_of = _peer()
    version = torch.__version__.partition("+")[0]
    possible = b.counts["possible right"] + b.counts["possible refused"]
    rows = [
        ("A, one device, float32 forward", len(a.lines), a.without("float32"), a.counts["float32 wrong"]),
        ("A, backward, where torch has one", len(backward.lines), backward.without("backward"),
         a.counts["backward wrong"]),
    ]  # fmt: skip
    for d in ("int64", "bool", "bfloat16", "complex64"):
        those = a.those(d)
        rows.append((f"A, {d}", len(those.lines), those.without(d), a.counts[f"{d} wrong"]))
    rows += [
        ("B, mesh of 4, Replicate and Shard, `auto_redistribute`", len(b.lines), b.right, _wrong(b)),
        ("C, Partial, uneven, empty, 2 x 2, gradients, `auto_redistribute`", len(c.lines), c.right, _wrong(c)),
    ]
    text = f"""# Conformance: torch's operator database through dtorch

Written by `make conformance` (torch {version}, seed {options.seed}); do not edit. It takes every operator of
torch's own `op_db` that supports float32 on a CPU, with torch's own samples, and compares what dtorch gives
with what plain torch gives. A try is *right*, *refused* (a `PlacementError` that says what to write), or
*wrong*; any other exception counts as wrong. An operator is right if every try of it is. Random operators are
compared under one seed; of uninitialised ones shape and dtype are compared; samples that torch itself refuses
or does not repeat are skipped.

| level | operators | right | wrong tries |
|---|---|---|---|
{_table(rows)}
## Beside torch DTensor

| | torch DTensor 2.13 | dtorch |
|---|---|---|
| operators right on a 1-D mesh of 4 | {peer} of {peer_of} (Replicate, divisible Shard) | {b.right} of {len(b.lines)} |
| Partial, uneven and empty shards, 2-D meshes, gradients | not checked | {c.right} of {len(c.lines)} |

torch DTensor's figure counts every product of Replicate and divisible Shard over the tensor arguments,
where a failure of any fails the operator; the list is `tests/conformance/{PEER.name}`. dtorch's takes
shards that are not divisible too.

## Tries

| level | right | of them rounded | refused | wrong |
|---|---|---|---|---|
{_table([(f"{f.level} {how}", *_tries(f, mode))
         for f in (b, c) for mode, how in (("strict", "strict"), ("auto", "`auto_redistribute`"))])}
*Rounded* tries differ in float32, where a sample makes much of the last bits, and agree in float64 to 1e-9.

Which placements *could* be right without communication is found by running torch on the pieces and trying to
put the results together (results that are all zeros, or empty, prove nothing and are left out). Of the
{possible:,} combinations of level B that this proves possible, {b.coverage or 0.0:.1%} are right in strict
mode.

At most {FULL["B"][0]} samples of an operator and {FULL["B"][1]} combinations of a sample are tried at level B,
{FULL["C"][0]} and {FULL["C"][1]} at level C, chosen by the seed; level A tries every sample.

## Operators that are not right in every try
"""  # fmt: skip
    for f in (a, b, c):
        text += f"\nLevel {f.level}:\n\n" + (
            "".join(f"* `{o}`: {_one_line(w)}\n" for o, w in f.bad.items()) or "none\n"
        )
    DOCUMENT.write_text(text)


def _tries(f: Figures, mode: str) -> tuple[int, ...]:
    right, rounded, refused, wrong = (f.counts[f"{mode} {k}"] for k in ("right", "rounded", "refused", "wrong"))
    return right + rounded, rounded, refused, wrong


def _wrong(f: Figures) -> int:
    return f.counts["strict wrong"] + f.counts["auto wrong"]


def _table(rows: list[tuple[Any, ...]]) -> str:
    return "".join("| " + " | ".join(f"{c:,}" if type(c) is int else str(c) for c in row) + " |\n" for row in rows)


def _one_line(why: str) -> str:
    text = " ".join(why.split()).replace("|", "\\|")
    return text if len(text) <= 300 else text[:300] + " …"
