"""Interned: one object a key, for as long as someone uses it, whatever threads do."""

from __future__ import annotations

import gc
import random
import sys
import threading

from dtorch.interning import Interned


class Value:
    pass


def test_first_one_stays() -> None:
    interned: Interned[Value] = Interned()
    first, second = Value(), Value()
    assert interned.get("a") is None
    assert interned.add("a", first) is first
    assert interned.add("a", second) is first
    assert interned.get("a") is first


def test_forgotten_when_nobody_uses_it() -> None:
    interned: Interned[Value] = Interned()
    interned.add("a", Value())
    gc.collect()
    assert len(interned) == 0
    assert interned.get("a") is None
    again = Value()
    assert interned.add("a", again) is again


def test_threads_that_make_and_drop_never_see_two() -> None:
    interned: Interned[Value] = Interned()
    holders: list[dict[int, Value]] = [{} for _ in range(4)]
    wrong: list[int] = []
    turn = threading.Barrier(4)

    def work(me: int) -> None:
        choose = random.Random(me)
        for _ in range(300):
            held = holders[me] = {}
            for _ in range(5):
                key = choose.randrange(6)
                held[key] = interned.get(key) or interned.add(key, Value())
            turn.wait()
            wrong.extend(k for other in holders for k, v in other.items() if held.get(k, v) is not v)
            turn.wait()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []
    holders.clear()
    gc.collect()
    assert len(interned) == 0
