"""Random numbers: every executor's generator stands where a single device's would when it draws.

A generator moves only when its executor takes part in a draw. The client counts draws; before executors draw together,
those that have missed some are given the state of one that has not.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .command import Seed, SendRandom, SyncRandom

if TYPE_CHECKING:
    from .client import Client

__all__ = ["Draws"]


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
        self._lock = threading.RLock()

    def add(self, executors: Iterable[int], *, seeded: bool = False) -> None:
        """Executors are new; `seeded`: they were given the seed, and nothing has drawn since."""
        for e in executors:
            newest = self._newest[e >= self._client.accelerators]
            self._versions[e] = newest if seeded else -1 if newest else 0

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
        root = self.root(gpu)
        return self._client.ask(lambda token: SendRandom(root, token), root)

    def set_state(self, state: bytes, gpu: bool = False) -> None:
        """Every generator of the kind continues from `state`."""
        self._client.ensure(1)
        members = tuple(e for e in self._client.writer.readers if (e >= self._client.accelerators) == gpu)
        self._client.send(SyncRandom(0, members, None, state))
        self._latest = self._newest[gpu] = self._latest + 1
        self._versions.update(dict.fromkeys(members, self._latest))
