"""What combines and is refused: the committed list may only shrink."""

from __future__ import annotations

import random

import torch

from . import discovery
from .database import Database, database
from .discovery import committed, discover, is_telling
from .harness import WIDE, Sample

aten = torch.ops.aten
ALLOWED = 0.95
"""Of the Shard and Replicate combinations that are possible, rules allow at least this share."""
SLICE = 5


def test_the_list_is_sorted_and_counts_what_it_says() -> None:
    content = committed()
    assert content["missing"] == sorted(set(content["missing"]))
    assert content["overloads"] == len(content["reached"]) > 450
    assert content["allowed"] >= ALLOWED * content["possible"] > 500


def _some() -> Database:
    """Everything in the long run, else the overloads that a few entries of op_db are the first to reach."""
    reached = committed()["reached"]
    entries = sorted(set(reached.values()))
    found = database(None if WIDE else random.Random(1).sample(entries, SLICE))
    samples = {k: v for k, v in found.samples.items() if found.entry[k] == reached.get(k)}
    return Database(samples, found.entry)


def test_no_strategy_is_missing_but_those_listed() -> None:
    some = _some()
    found = discover(some.samples)
    assert sum(found.overloads.values()) > 5
    new = set(found.missing) - set(committed()["missing"])
    assert not new, f"write a rule, or run python -m tests.pure.discovery: {sorted(new)}"
    if WIDE:
        gone = set(committed()["missing"]) - set(found.missing)
        assert not gone, f"shorten the list (python -m tests.pure.discovery): {sorted(gone)}"


def test_discovery_finds_what_a_rule_lacks(monkeypatch: object) -> None:
    sample = Sample(aten.mm.default, (torch.randn(6, 7).double(), torch.randn(7, 8).double()))
    found = discover({"aten.mm.default": [sample]})
    assert found.possible["aten.mm.default"] == found.allowed["aten.mm.default"] == 3
    monkeypatch.setattr(discovery, "is_allowed", lambda sample, combo: False)  # type: ignore[attr-defined]
    found = discover({"aten.mm.default": [sample]})
    assert "aten.mm.default: S(1), S(0) -> P(sum)" in found.missing
    assert "aten.mm.default: P(sum), R -> P(sum)" in found.missing


def test_what_tells_nothing_proves_nothing() -> None:
    nan = float("nan")
    assert is_telling([torch.tensor([1.0, 2.0])]) and is_telling([None, torch.tensor(3)])
    for t in (torch.zeros(3), torch.ones(4), torch.tensor(1), torch.tensor([nan, nan]), torch.empty(0)):
        assert not is_telling([t])
