"""A slice of the conformance run, chosen by a seed, and every operator that once failed and was mended, in full."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .database import operators
from .report import EXPECTATIONS, judge, summarise
from .runner import Options, conduct

FIXED = Path(__file__).with_name("fixed.json")
# (every n-th operator, samples, combinations): `make conformance` tries all of them, and more of each.
SLICE = {"A": (8, 6, 1), "B": (16, 4, 5), "C": (16, 4, 5)}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("level", ["A", "B", "C"])
def test_slice(level: str, tmp_path: Path) -> None:
    step, samples, combinations = SLICE[level]
    options = Options((level,), first=3, step=step, samples=samples, combinations=combinations)
    lines = conduct(options, tmp_path / "lines.jsonl")
    assert len(lines) == len(options.names())
    assert judge(lines, options) == 0, summarise(lines)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("level", ["A", "B", "C"])
def test_what_was_mended_stays_right(level: str, tmp_path: Path) -> None:
    names = json.loads(FIXED.read_text())[level]
    options = Options((level,), these=tuple(names))
    lines = conduct(options, tmp_path / "lines.jsonl")
    assert [x["operator"] for x in lines] == sorted(names)
    assert judge(lines, options) == 0, summarise(lines)


def test_lists_name_operators_of_the_database() -> None:
    every = operators()
    for file in (EXPECTATIONS, FIXED):
        for names in json.loads(file.read_text()).values():
            assert not set(names) - set(every)


def test_nothing_is_both_failing_and_mended() -> None:
    expected, fixed = json.loads(EXPECTATIONS.read_text()), json.loads(FIXED.read_text())
    for level, names in fixed.items():
        assert not set(names) & set(expected.get(level, {})), level
