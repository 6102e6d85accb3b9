"""What became of failures: which call issued the command, what the executor said, who was told.

Commands are named by their position in the ring. The client notes, beside each command, the code and instruction of
the line that issued it; a failure's report is matched to it when someone asks.
"""

from __future__ import annotations

import logging
import os
import pickle
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch

from ..errors import RemoteError, TensorLostError, remote
from .command import ErrorReport

if TYPE_CHECKING:
    from .client import Client

__all__ = ["Failures", "internal_files", "site_of", "user_frame"]

log = logging.getLogger("dtorch")

SITES = 1 << 18
SITE_MASK = SITES - 1

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep

# file name -> whether its lines are torch's or ours, and so never the user's call
internal_files: dict[str, bool] = {}


def is_internal(filename: str) -> bool:
    """Whether a line of `filename` is torch's or dtorch's own."""
    found = internal_files.get(filename)
    if found is None:
        found = internal_files[filename] = filename.startswith((_OURS, _TORCH, "<"))
        if filename.startswith("<"):
            # "<stdin>", "<ipython-input…>" are the user's; "<frozen…>", "<string>", "<dtorch plan>" are not.
            found = internal_files[filename] = filename.startswith(("<frozen", "<string", "<dtorch"))
    return found


def user_frame(frame: FrameType) -> FrameType:
    """The nearest frame of the user's own code, from `frame` outwards; `frame` itself where there is none."""
    f: FrameType | None = frame
    while f is not None:
        if not is_internal(f.f_code.co_filename):
            return f
        f = f.f_back
    return frame


def site_of(code: CodeType, instruction: int) -> str:
    """``file.py:12 in function`` of an instruction."""
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= instruction < end and number is not None:
            line = number
    path = os.path.relpath(code.co_filename) if os.path.isabs(code.co_filename) else code.co_filename
    return f"{path}:{line} in {code.co_name}"


class Failures:
    """Reports of one pool's failures, and the sites of its recent commands."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.codes: list[CodeType | None] = [None] * SITES
        self.instructions = [0] * SITES
        self._reports: dict[int, ErrorReport] = {}
        self._asked: set[int] = set()
        self._slots: dict[tuple[int, int], tuple[int | None, int]] = {}

    def note(self, position: int, frame: FrameType) -> None:
        """Remember that the command at `position` was issued from `frame`."""
        f = user_frame(frame)
        k = position >> 1 & SITE_MASK
        self.codes[k] = f.f_code
        self.instructions[k] = f.f_lasti

    def add(self, report: ErrorReport) -> None:
        """Take in what an executor told."""
        # The same failure on several ranks is one failure: the first report stands for it.
        self._reports.setdefault(report.sequence, report)

    def fail_slot(self, slot: int, generation: int, sequence: int | None, before: int) -> None:
        """A fetch into `slot` met a poisoned value."""
        self._slots.setdefault((slot, generation), (sequence, before))

    def of_slot(self, slot: int, generation: int) -> BaseException:
        """The error behind a failed fetch."""
        client = self._client
        client.drain()
        found = self._slots.pop((slot, generation), None)
        if found is None:
            return RemoteError("a value could not be computed, and its executor gave no reason")
        sequence, before = found
        if sequence is None:
            # A peer told of it in a collective: the cause is the last failure before that.
            earlier = [s for s in self._reports if s <= before]
            if not earlier:
                return RemoteError("a value could not be computed: a peer failed and gave no reason")
            sequence = max(earlier)
        return self.error(sequence)

    def error(self, sequence: int) -> BaseException:
        """The failure of command `sequence` as an exception of its original type."""
        report = self._reports.get(sequence)
        if report is None:
            return RemoteError("a value could not be computed; the report of the failure was lost")
        self._asked.add(sequence)
        return self._exception(report)

    def _exception(self, report: ErrorReport) -> BaseException:
        kind: type[BaseException] = RuntimeError
        try:
            kind = cloudpickle.loads(report.type_bytes)
        except Exception:
            log.debug("the type of a remote error could not be read", exc_info=True)
        if kind is KeyError and "ref" in report.notes:
            kind = TensorLostError
        cls = kind if issubclass(kind, TensorLostError) else remote(kind)
        try:
            arguments: tuple[Any, ...] = pickle.loads(report.arguments)
        except Exception:
            arguments = (report.message,)
        error = cls(*arguments)
        site = self.site(report.sequence)
        where = f" on rank {report.rank}" if report.rank is not None else ""
        for note in report.notes:
            error.add_note(note)
        error.add_note(f"  in {report.text}{where} (executor {report.executor})")
        if site:
            error.add_note(f"  issued at {site}")
        error.add_note(report.traceback.rstrip())
        if isinstance(error, RemoteError):
            error.rank = report.rank
            error.operator = report.text
            error.site = site
            error.executor_traceback = report.traceback
        return error

    def raise_newest(self) -> None:
        """Raise the oldest failure that nobody has asked for yet, if there is one."""
        for sequence in sorted(self._reports):
            if sequence not in self._asked:
                raise self.error(sequence)

    def site(self, sequence: int) -> str:
        """Where command `sequence` was issued, if it is still remembered."""
        k = sequence >> 1 & SITE_MASK
        code = self.codes[k]
        if code is None or self._client.writer.head - sequence > 2 * SITES:
            return ""
        return site_of(code, self.instructions[k])

    def summary(self) -> None:
        """Log, once, the failures that nobody asked for."""
        untold = [r for s, r in sorted(self._reports.items()) if s not in self._asked]
        if untold:
            first = untold[0]
            log.error(
                "%d failed operation%s whose value nobody asked for; the first: %s: %s, in %s, issued at %s",
                len(untold),
                "" if len(untold) == 1 else "s",
                first.type_name,
                first.message,
                first.text,
                self.site(first.sequence) or "an unknown line",
            )
