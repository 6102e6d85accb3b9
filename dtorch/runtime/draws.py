"""Random numbers: every executor's generator stands where a single device's would when it draws.

A generator moves only when its executor takes part in a draw. The client counts draws; before executors draw together,
those that have missed some are given the state of one that has not.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from .command import Seed, SendRandom, SyncRandom

if TYPE_CHECKING:
    from .client import Client

__all__ = ["AskedState", "Draws", "own_state", "set_own_state"]


class Draws:
    """The generators of one client's executors. CPUs' and GPUs' have nothing to do with each other: `gpu` says which.

    Attributes:
        seeded: the seed that was given last, if any.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        # How many random draws the generator of each executor has seen; they agree while the numbers do.
        self._versions: dict[int, int] = {}
        self._latest = 0
        # The latest of either kind.
        self._newest = {False: 0, True: 0}
        self.seeded: int | None = None
        # (executor, token) of states that nobody will read, whose replies are to be thrown away when they come.
        self.unread: set[tuple[int, int]] = set()
        self._lock = threading.RLock()
        _follow_states(self)

    def add(self, executors: Iterable[int], *, seeded: bool = False) -> None:
        """Executors are new; `seeded`: they were given the seed, and nothing has drawn since."""
        for e in executors:
            newest = self._newest[e >= self._client.accelerators]
            self._versions[e] = newest if seeded else -1 if newest else 0

    def start_from(self, seed: int) -> None:
        """Executors, of which there are none yet, start from `seed`."""
        self.seeded, self._latest = seed, 1
        self._newest = dict.fromkeys(self._newest, 1)

    def seed(self, seed: int) -> None:
        """Every generator starts again from `seed`."""
        self._client.ensure(1)
        self._client.send(Seed(seed))
        self.seeded = seed
        self._latest += 1
        self._newest = dict.fromkeys(self._newest, self._latest)
        self._versions = dict.fromkeys(self._client.writer.readers, self._latest)

    def begin(self, executors: tuple[int, ...]) -> None:
        """The generators of `executors` are brought to the latest state, and draw together with the next command.

        Until :meth:`end` no other thread's draw can come between.
        """
        self._lock.acquire()
        kind = executors[0] >= self._client.accelerators
        latest = self._newest[kind]
        versions = self._versions
        stale = tuple(e for e in executors if versions[e] != latest)
        if stale:
            root = self.root(kind)
            members = tuple(sorted({root, *stale}))
            self._client.send(SyncRandom(root, members, self._client.region(members)))
            for e in stale:
                versions[e] = latest
        self._latest = self._newest[kind] = latest = self._latest + 1
        for e in executors:
            versions[e] = latest

    def kinds(self) -> tuple[bool, ...]:
        """The kinds of generators there are: those of CPUs (False), and those of GPUs (True) once a GPU is used."""
        self._client.ensure(1)
        return tuple(sorted({e >= self._client.accelerators for e in self._client.writer.readers}))

    def count(self, gpu: bool) -> int:
        """A number that changes with every draw of the kind."""
        return self._newest[gpu]

    def root(self, gpu: bool) -> int:
        """An executor whose generator has seen all draws of its kind."""
        return next(
            e for e, v in self._versions.items() if v == self._newest[gpu] and (e >= self._client.accelerators) == gpu
        )

    def end(self) -> None:
        """The command that draws was issued."""
        self._lock.release()

    def state(self, gpu: bool = False) -> bytes:
        """The generator's state, as torch's generator of the kind gives it."""
        self._client.ensure(1)
        self._client.waiting.on_block()
        root = self.root(gpu)
        return self._client.ask(lambda token: SendRandom(root, token), root)

    def set_state(self, state: bytes, gpu: bool = False) -> None:
        """Every generator of the kind continues from `state`."""
        self._client.ensure(1)
        members = tuple(e for e in self._client.writer.readers if (e >= self._client.accelerators) == gpu)
        self._client.send(SyncRandom(0, members, None, state))
        self._latest = self._newest[gpu] = self._latest + 1
        self._versions.update(dict.fromkeys(members, self._latest))


class AskedState:
    """The state that the generators of CPUs or of GPUs have at this point of the program; asked for now, read later."""

    def __init__(self, client: Client, gpu: bool) -> None:
        self._client = c = client
        # Long programs ask often and read seldom: take in what came, so that no executor waits to be read.
        c.drain()
        for key in c.draws.unread & c._replies.keys():
            del c._replies[key]
            c.draws.unread.discard(key)
        self.draws = c.draws.count(gpu)
        self._key = (c.draws.root(gpu), next(c._tokens))
        self._state: bytes | None = None
        c.send(SendRandom(*self._key), sync=True)

    def read(self) -> bytes:
        """The state; waits until the executor that was asked has come so far, however much was issued before."""
        if self._state is not None:
            return self._state
        self._client.waiting.on_block()
        state: bytes = self._client._answers([self._key])[0]
        self._state = state
        return state

    def __del__(self) -> None:
        if getattr(self, "_state", b"") is None:
            self._client.draws.unread.add(self._key)


# -- torch's own get_rng_state and set_rng_state ----------------------------------------------------------------------

own_state, set_own_state = torch.get_rng_state, torch.set_rng_state
"""State of this process's generator alone."""
_latest: weakref.ref[Draws] | None = None


def _follow_states(draws: Draws) -> None:
    """Have ``torch.get_rng_state`` and ``set_rng_state`` keep and restore the generators of the executors as well.

    What a state of this process's generator is kept for (torch.utils.checkpoint and torch.random.fork_rng do) was drawn
    on the executors: a mask recomputed from another state would make wrong gradients. The tensor that torch returns
    carries the executors' states along.
    """
    global _latest
    _latest = weakref.ref(draws)
    if torch.get_rng_state is own_state:
        torch.get_rng_state = torch.random.get_rng_state = _get_state
        torch.set_rng_state = torch.random.set_rng_state = _set_state


def _following() -> Draws | None:
    draws = None if _latest is None else _latest()
    return None if draws is None or draws._client.closed else draws


@functools.wraps(own_state)
def _get_state() -> torch.Tensor:
    state = own_state()
    draws = _following()
    if draws is not None and type(state) is torch.Tensor:
        state._dtorch = {gpu: AskedState(draws._client, gpu) for gpu in draws.kinds()}  # type: ignore[attr-defined]
    return state


@functools.wraps(set_own_state)
def _set_state(new_state: torch.Tensor) -> None:
    set_own_state(new_state)
    draws = _following()
    states: dict[bool, Any] = getattr(new_state, "_dtorch", {})
    for gpu, asked in states.items():
        # Where nothing was drawn since, there is nothing to restore, nor to wait for.
        if draws is not None and asked._client is draws._client and draws.count(gpu) != asked.draws:
            draws.set_state(asked.read(), gpu)
