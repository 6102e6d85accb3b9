"""How a soak tells what it found: violations with the line that runs them again, figures beside their bounds."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests import soak
from tests.conftest import MARKER
from tests.soak.driver import Result, _count, table
from tests.soak.parts import PARTS, Part
from tests.soak.worker import work

PART = Part("made_up", "things tried", 4, 1.0, 60, "slowest", 1.0, "s")


class Trials:
    """Trial 2 fails; later ones take longer."""

    def trial(self, seed: int) -> float:
        assert seed != 2, "two is refused"
        return seed / 2

    def close(self) -> Iterator[str | float]:
        yield "something grew"
        yield 0.25


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What a worker tells of trials 0 to 3."""
    monkeypatch.setitem(sys.modules, f"{soak.__name__}.made_up", SimpleNamespace(Trials=Trials))
    monkeypatch.setenv(MARKER, os.environ.get(MARKER, ""))
    read, write = os.pipe()
    with os.fdopen(read) as lines:
        try:
            with warnings.catch_warnings():
                work(PART, 0, 4, 60, write)
        finally:
            os.close(write)
        return [json.loads(line) for line in lines]


def test_a_worker_tells_of_each_trial(told: list[dict[str, Any]]) -> None:
    assert [t["begin"] for t in told if "begin" in t] == [0, 1, 2, 3]
    assert [t["figure"] for t in told if "seed" in t] == [0, 0.5, None, 1.5]
    (violation,) = [t["violation"] for t in told if t.get("violation")]
    assert "AssertionError: two is refused" in violation
    assert told[-1] == {"end": ["something grew", 0.25]}


def test_violations_say_how_to_run_them_again(told: list[dict[str, Any]]) -> None:
    result = Result(PART, 4)
    for line in told:
        if "seed" in line:
            _count(result, line)
    assert result.worst == 1.5
    refused, slow = result.violations
    assert "two is refused" in refused
    assert refused.endswith("python -m tests.soak --only made_up --seed 2 --count 1")
    assert "slowest: 1.500 s, and the bound is 1 s" in slow and slow.endswith("--seed 3 --count 1")


def test_the_table_says_how_far_it_got() -> None:
    whole, short = Result(PART, 4, done=4, worst=0.5), Result(dataclasses.replace(PART, each=1000), 4, done=3)
    text = table([whole, short])
    assert "4 of         4          0       0.5 s       1 s" in text
    assert "3,000 of     4,000" in text
    assert "Time ran out" in text and text.endswith("made_up.")
    assert "Time ran out" not in table([whole])


def test_parts_have_modules() -> None:
    assert len({part.name for part in PARTS}) == len(PARTS) == 8
    for part in PARTS:
        assert os.path.exists(os.path.join(os.path.dirname(soak.__file__), f"{part.name}.py"))
