"""Interning: equal values become one object, which lives as long as someone uses it.

A ``WeakValueDictionary`` would do, but for threads: between its look and its store another thread may store.
Here the one step that decides is a single ``dict.setdefault``, so no lock is needed (a garbage collection that
interns something of its own cannot deadlock) and a hit costs one dictionary look-up and one call.
"""

from __future__ import annotations

import weakref
from _weakref import _remove_dead_weakref  # pyright: ignore[reportAttributeAccessIssue]
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")

__all__ = ["Interned"]


class _Ref(weakref.ref[T]):
    """A weak reference that knows the key to forget."""

    __slots__ = ("key",)
    key: Hashable


class Interned(Generic[T]):
    """key → the one object of that key, held weakly."""

    __slots__ = ("_forget", "_refs")

    def __init__(self) -> None:
        refs: dict[Hashable, _Ref[T]] = {}

        def forget(ref: _Ref[T]) -> None:
            # Only if the entry is (still) a dead one: by now another object may stand there.
            _remove_dead_weakref(refs, ref.key)

        self._refs, self._forget = refs, forget

    def get(self, key: Hashable) -> T | None:
        """The object of `key`, if there is one."""
        ref = self._refs.get(key)
        return None if ref is None else ref()

    def add(self, key: Hashable, made: T) -> T:
        """`made`, now the object of `key`; or the one that another thread added first."""
        mine: _Ref[T] = _Ref(made, self._forget)
        mine.key = key
        while True:
            found = self._refs.setdefault(key, mine)()
            if found is not None:
                return found
            _remove_dead_weakref(self._refs, key)

    def __len__(self) -> int:
        return len(self._refs)
