"""Looking on before a sleep: as long as it pays, and seldom where it does not."""

from __future__ import annotations

import itertools
import time

from dtorch.runtime.linger import Linger


def test_what_paid_is_done_again() -> None:
    linger = Linger(1000)
    assert all(linger.look(lambda: True) for _ in range(100))


def test_what_did_not_pay_is_left_out_twice_as_long_each_time() -> None:
    linger = Linger(0)
    looks = []
    for i in range(1000):
        if linger.pays():
            looks.append(i)
            linger.paid(False)
    gaps = [b - a for a, b in itertools.pairwise(looks)]
    assert gaps[:7] == [2, 4, 8, 16, 32, 64, 65]
    assert set(gaps[6:]) == {65}


def test_one_success_ends_the_pause() -> None:
    linger = Linger(0)
    for _ in range(300):
        if linger.pays():
            linger.paid(False)
    while not linger.pays():
        pass
    linger.paid(True)
    assert linger.pays()
    linger.paid(False)
    assert not linger.pays()
    assert linger.pays()


def test_it_looks_on_for_as_long_as_it_was_told() -> None:
    linger = Linger(20_000)
    start = time.monotonic()
    assert not linger.look(lambda: False)
    assert time.monotonic() - start >= 0.02
    start = time.monotonic()
    assert not linger.look(lambda: True)  # left out
    assert time.monotonic() - start < 0.02


def test_it_stops_as_soon_as_it_is_ready() -> None:
    answers = iter([False] * 5 + [True])
    assert Linger(10_000_000).look(lambda: next(answers))
