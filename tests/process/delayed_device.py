"""A device that is late: a stand-in for a GPU whose copies end some time after they were started.

Values lie in host memory and operators run at once. But a copy to the host only happens when its event comes, and what
was there before is overwritten with noise; and a copy from the host is checked then: the memory it came from must be
as it was when the copy began. So whoever reads a result too early reads noise, and a block of the arena that is used
again too early ends the executor.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from dtorch.executor.device import Accelerator, is_lasting
from dtorch.executor.transfers import Event, Transfers
from dtorch.runtime.command import OutLayout
from dtorch.runtime.shared import SharedState

REUSED = 77
"""Exit code of an executor that found its upload's memory changed."""


class Point:
    """The event: comes `delay` seconds after it was recorded."""

    def __init__(self, delay: float, then: list[Callable[[], None]]) -> None:
        self.due, self.then = time.monotonic() + delay, then

    def query(self) -> bool:
        if time.monotonic() < self.due:
            return False
        for action in self.then:
            action()
        return True


class Delayed(Accelerator):
    """One late device. Options: "delay" (seconds), "pinned" (bytes of the arena that it reaches)."""

    name = "late"
    torch_device = torch.device("cpu")
    # An error of the device that stays: it is raised wherever the device is asked for anything.
    lost: BaseException | None = None

    def open(self, state: SharedState, options: dict[str, Any]) -> None:
        self.delay, self.pinned = options["delay"], options["pinned"]
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(state.arena_map))
        self.end = self.base + len(state.arena_map)
        # Kept, so that no other tensor is ever taken for one of them.
        self.staged: dict[int, torch.Tensor] = {}
        self.actions: list[Callable[[], None]] = []
        current.append(self)

    def transfers(self, state: SharedState, index: int, tell: Callable[[], object]) -> Transfers | None:
        return Transfers(self, state, index, tell)

    def empty(self, layout: OutLayout) -> torch.Tensor:
        t = super().empty(layout)
        # What a real device leaves in new memory is not what was copied there last time.
        return t.fill_(1) if t.dtype == torch.bool else t.fill_(77)

    def set_threads(self, count: int) -> None:
        torch.set_num_threads(1)

    def is_lost_by(self, error: BaseException) -> bool:
        return self.lost is not None or is_lasting(error)

    def staging(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        t = torch.empty(numel, dtype=dtype)
        self.staged[t.data_ptr()] = t
        return t

    def reaches(self, start: int, end: int) -> bool:
        return end <= self.pinned

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        assert to.is_contiguous() and source.is_contiguous() and to.dtype == source.dtype
        before = source.clone()
        if self.base <= to.data_ptr() < self.end or to.data_ptr() in self.staged:
            to.view(torch.uint8).fill_(0xA5)

            def land() -> None:
                to.copy_(before)

            self.actions.append(land)
            return
        to.copy_(source)

        def check() -> None:
            if not torch.equal(source.view(torch.uint8), before.view(torch.uint8)):
                print("the memory of an upload was used again before it was copied", file=sys.stderr, flush=True)
                os._exit(REUSED)

        self.actions.append(check)

    def record(self) -> Event:
        if self.lost is not None:
            raise self.lost
        actions, self.actions = self.actions, []
        return Point(self.delay, actions)


current: list[Delayed] = []
"""The device of this process, for functions that a test sends to it."""
