"""Decisions of the scheduler, as tables."""

from __future__ import annotations

import pytest

from dtorch.runtime.scheduler import (
    DOZE_WAKE_WORDS,
    Failure,
    Pressure,
    failure,
    headroom,
    pressure,
    run_ahead,
    should_wake,
)
from dtorch.runtime.shared import ASLEEP, DEAD_POOL, DOZING, RUNNING


@pytest.mark.parametrize(
    ("state", "unread", "sync", "expected"),
    [
        (RUNNING, 10_000, True, False),
        (DOZING, DOZE_WAKE_WORDS - 1, False, False),
        (DOZING, DOZE_WAKE_WORDS, False, True),
        (DOZING, 1, True, True),
        (DOZING, 0, True, False),
        (ASLEEP, 1, False, True),
        (ASLEEP, 0, True, False),
        (ASLEEP, -5, True, False),
    ],
)
def test_should_wake(state: int, unread: int, sync: bool, expected: bool) -> None:
    assert should_wake(state, unread, sync) is expected


@pytest.mark.parametrize(
    ("issued", "consumed", "expected"), [(10, [], 0), (10, [10], 0), (10, [10, 3, 9], 7), (0, [0, 0], 0)]
)
def test_run_ahead(issued: int, consumed: list[int], expected: int) -> None:
    assert run_ahead(issued, consumed) == expected


@pytest.mark.parametrize(
    ("behind", "expected"),
    [
        (0, Pressure.NONE),
        (49, Pressure.NONE),
        (50, Pressure.SOFT),
        (99, Pressure.SOFT),
        (100, Pressure.HARD),
        (1000, Pressure.HARD),
    ],
)
def test_pressure(behind: int, expected: Pressure) -> None:
    assert pressure(behind, 50, 100) is expected


@pytest.mark.parametrize(
    ("head", "slowest", "behind", "expected"),
    [
        (0, 0, 0, 1000),  # the whole ring
        (600, 100, 100, 1100),  # the slowest reader holds the rest
        (600, 600, 990, 620),  # ten more commands, at two words each
        (600, 600, 1000, 600),  # not one more
        (600, 600, 1007, 600),
    ],
)
def test_headroom(head: int, slowest: int, behind: int, expected: int) -> None:
    assert headroom(head, slowest, 1000, behind, 1000) == expected


@pytest.mark.parametrize(
    ("word", "expected"),
    [(0, None), (1, Failure(0)), (5, Failure(4)), (DEAD_POOL, Failure(None)), (DEAD_POOL | 3, Failure(None))],
)
def test_failure(word: int, expected: Failure | None) -> None:
    assert failure(word) == expected
