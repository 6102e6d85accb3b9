"""What became of failures: which call issued the command, what the executor said, who was told.

Commands are named by their position in the ring. The client notes, beside each command, the code and instruction of
the line that issued it; a failure's report is matched to it when someone asks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch

from ..errors import DtorchError, RemoteError, TensorLostError
from .command import LOST_WITH_POOL, LOST_WRITE, Cause, Dropped, ErrorReport, FetchFailed
from .transport import rebuild

if TYPE_CHECKING:
    from .client import Client

__all__ = ["Failures", "internal_files", "is_internal", "is_ours", "site_of", "user_frame", "with_site"]

log = logging.getLogger("dtorch")

# Times that one line of the program is logged for values it dropped.
_PER_SITE = 10
# Failures whose reports are kept, and how many of one failure's ranks are listed by themselves.
KEPT = 4096
_LISTED = 8
SITES = 1 << 16
SITE_MASK = SITES - 1

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep

# file name -> whether its lines are torch's or ours, and so never the user's call
internal_files: dict[str, bool] = {}


def is_internal(filename: str) -> bool:
    """Whether a line of `filename` is torch's or dtorch's own."""
    found = internal_files.get(filename)
    if found is None:
        if filename.startswith("<"):
            # "<stdin>", "<ipython-input…>" are the user's, and "<string>" is where that is the program (python -c);
            # else it is what dataclasses and their like generate.
            found = filename.startswith(("<frozen", "<dtorch")) or (filename == "<string>" and sys.argv[:1] != ["-c"])
        else:
            found = filename.startswith((_OURS, _TORCH))
        internal_files[filename] = found
    return found


def is_ours(filename: str) -> bool:
    """Whether a line of `filename` is dtorch's own."""
    return filename.startswith(_OURS)


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
    return f"{code.co_filename.removeprefix(os.getcwd() + os.sep)}:{line} in {code.co_name}"


def with_site(error: Exception) -> Exception:
    """`error`, of a call that is about to be refused, with the user's line: in the message of dtorch's own errors, in
    a note of torch's, whose words stay its own."""
    frame = user_frame(sys._getframe(1))
    site = site_of(frame.f_code, frame.f_lasti)
    if isinstance(error, DtorchError) and len(error.args) == 1:
        error.args = (f"{error.args[0]}\n  {site}",)
    else:
        error.add_note(f"  {site}")
    return error


_LOST = {
    LOST_WITH_POOL: (
        "the value of this tensor ended with the pool it lay in (after dtorch.shutdown() or restart(), or, in a forked "
        "process, it is the parent's).\n  Write:  t.copy_(value), or model.load_state_dict(…), or make it anew"
    ),
    LOST_WRITE: (
        "the value of this tensor is lost: a write to it failed after some of it was written, so neither the old value "
        "nor the new one stands.\n  Write:  t.copy_(value), or load a checkpoint"
    ),
}


@dataclass(slots=True)
class Failure:
    """One command that failed: what each rank told of it, and the site it was issued at."""

    site: str
    reports: list[ErrorReport] = field(default_factory=list)

    def add(self, report: ErrorReport) -> None:
        """Take in one more report. Of those that say the same, the text is kept once."""
        for known in self.reports:
            if _kind(known) == _kind(report):
                report = replace(report, told=known.told, traceback="")
                break
        self.reports.append(report)

    def groups(self) -> list[list[ErrorReport]]:
        """The reports, those that say the same together, ranks in order."""
        found: dict[tuple[str, str], list[ErrorReport]] = {}
        for report in sorted(self.reports, key=lambda r: (r.rank is None, r.rank or 0, r.executor)):
            found.setdefault(_kind(report), []).append(report)
        return list(found.values())

    @property
    def first(self) -> ErrorReport:
        """The one that stands for all."""
        return self.groups()[0][0]


def _kind(report: ErrorReport) -> tuple[str, str]:
    return report.told.name, report.told.message


def _ranks(ranks: list[int]) -> str:
    """``rank 3``, ``ranks 0-7``, ``ranks 0, 2-4``."""
    spans: list[list[int]] = []
    for r in ranks:
        if spans and spans[-1][1] == r - 1:
            spans[-1][1] = r
        else:
            spans.append([r, r])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


class Failures:
    """Reports of one pool's failures, and the sites of its recent commands."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.codes: list[CodeType | None] = [None] * SITES
        self.instructions = [0] * SITES
        self._lock = threading.Lock()
        # By the command that failed.
        self._reports: dict[int, Failure] = {}
        self._forgotten = 0  # of those no longer kept, how many nobody asked for
        self._asked: set[int] = set()
        # Command whose input had failed -> the command to blame for that.
        self._causes: dict[int, int] = {}
        # Slot -> its use, and the commands blamed by the executors that answered.
        self._slots: dict[int, tuple[int, list[int]]] = {}
        # Commands that any fetch has met: whoever holds its future says what became of them.
        self._blamed: set[int] = set()
        # (command whose values are all dropped, how many commands had been issued when that was learnt)
        self.dropped: list[tuple[int, int]] = []
        self._told: set[int] = set()
        self._told_of: Counter[str] = Counter()

    def note(self, position: int, frame: FrameType) -> None:
        """Remember that the command at `position` was issued from `frame`."""
        f: Any = frame
        try:
            while internal_files[f.f_code.co_filename]:
                f = f.f_back
        except (KeyError, AttributeError):  # a file not seen before, or no frame of the user's
            f = user_frame(frame)
        k = position >> 1 & SITE_MASK
        self.codes[k] = f.f_code
        self.instructions[k] = f.f_lasti

    def add(self, message: ErrorReport | Cause | Dropped | FetchFailed) -> None:
        """Take in what an executor told."""
        with self._lock:
            if isinstance(message, ErrorReport):
                failure = self._reports.get(message.sequence)
                if failure is None:
                    failure = self._reports[message.sequence] = Failure(self.site(message.sequence))
                    if len(self._reports) > KEPT:
                        self._forget_oldest()
                failure.add(message)
            elif isinstance(message, Cause):
                found = self._causes.get(message.sequence, message.cause)
                self._causes[message.sequence] = min(found, message.cause)
                if len(self._causes) > 16 * KEPT:
                    self._forget_oldest()
            elif isinstance(message, Dropped):
                self.dropped.append((message.sequence, self._client.writer.issued))
            else:
                self._blamed.add(message.sequence)
                generation, blamed = self._slots.get(message.slot, (0, []))
                if generation != message.generation:
                    blamed = []
                    self._slots[message.slot] = (message.generation, blamed)
                blamed.append(message.sequence)

    def _forget_oldest(self) -> None:
        """A program that fails for ever, and goes on, must not grow for ever."""
        oldest = sorted(self._reports)[: KEPT // 8] if len(self._reports) > KEPT else []
        self._forgotten += sum(s not in self._asked for s in oldest)
        for s in oldest:
            del self._reports[s]
        horizon = max(oldest, default=0)
        if len(self._causes) > 16 * KEPT:
            horizon = max(horizon, sorted(self._causes)[8 * KEPT])
        # Reports before the horizon are still known, should there be any: they are roots, which have no cause.
        self._causes = {s: cause for s, cause in self._causes.items() if s > horizon}
        for known in (self._asked, self._told, self._blamed):
            known.difference_update([s for s in known if s <= horizon and s not in self._reports])

    def of_slot(self, slot: int, generation: int) -> BaseException:
        """The error behind a failed fetch: of all that its executors blame, the first."""
        self._client.drain()
        with self._lock:
            found = self._slots.get(slot, (0, []))
            blamed = found[1] if found[0] == generation else []
            if not blamed:
                return RemoteError("a value could not be computed, and its executor gave no reason")
            roots = {self._root(s) for s in blamed}
            self._asked |= roots
        return self.error(min(roots))

    def unread(self, slot: int, generation: int) -> None:
        """A fetch failed that nobody waits for any longer: log that, unless it is known; never raises."""
        with contextlib.suppress(Exception):
            self._client.drain()
        with self._lock:
            found = self._slots.get(slot, (0, []))
            roots = {self._root(s) for s in found[1]} if found[0] == generation else set()
            untold = [s for s in sorted(roots) if s in self._reports and s not in self._asked]
            self._asked |= roots
        for sequence in untold[:1]:
            self._log("a value that was asked for was dropped unread, and could not be computed", sequence)

    def tell_dropped(self, done: int) -> None:
        """Log failures whose values are all dropped, and of which nobody asked for any.

        Args:
            done: commands that all executors had run before their messages were read: a fetch that was issued before
                its input was dropped has been answered then.
        """
        with self._lock:
            due = [s for s, issued in self.dropped if issued <= done]
            if not due:
                return
            self.dropped = [found for found in self.dropped if found[1] > done]
            known = self._asked | self._told | {self._root(s) for s in self._blamed}
            roots = [s for s in sorted({self._root(s) for s in due}) if s in self._reports and s not in known]
            self._told.update(roots)
            untold: list[int] = []
            for sequence in roots:
                # A line that fails again and again has said so: the others are in the summary.
                site = self._reports[sequence].site
                self._told_of[site] += 1
                if self._told_of[site] <= _PER_SITE:
                    untold.append(sequence)
        for sequence in untold:
            self._log("a value was dropped unread, and could not be computed", sequence)

    def _log(self, what: str, sequence: int) -> None:
        log.error("%s: %s", what, self._told_shortly(self._reports[sequence]))

    def _told_shortly(self, failure: Failure) -> str:
        first = failure.first
        return (
            f"{first.told.short_name}: {first.told.message}, in {first.text} {self._where(failure.groups()[0])}, "
            f"issued at {failure.site or 'an unknown line'}"
        )

    def _root(self, sequence: int) -> int:
        """What is to blame for the failure of command `sequence`."""
        while (cause := self._causes.get(sequence)) is not None:
            sequence = cause
        return sequence

    def error(self, sequence: int) -> BaseException:
        """The failure of command `sequence` as an exception of its original type."""
        if sequence in _LOST:
            return TensorLostError(_LOST[sequence])
        found = self._reports.get(sequence)
        if found is None:
            return RemoteError(
                f"a value could not be computed; why is no longer known: only the last {KEPT:,} failures are kept"
            )
        self._asked.add(sequence)
        return self._exception(found)

    def _exception(self, failure: Failure) -> RemoteError:
        same, *others = failure.groups()
        report = same[0]
        error = rebuild(report.told)
        error.add_note(f"  in {report.text} {self._where(same)}")
        for group in others[:_LISTED]:
            what = group[0].told
            error.add_note(f"  and {self._where(group)}: {what.short_name}: {what.message}")
        if len(others) > _LISTED:
            error.add_note(f"  and {len(others) - _LISTED} more, each another")
        if failure.site:
            error.add_note(f"  issued at {failure.site}, {self._ago(report)}")
        trace = next(r.traceback for r in failure.reports if r.traceback and _kind(r) == _kind(report))
        error.add_note(trace.rstrip())
        error.rank = report.rank
        error.ranks = tuple(r.rank for r in same if r.rank is not None)
        error.operator = report.text
        error.site = failure.site
        error.executor_traceback = trace
        return error

    def _where(self, same: list[ErrorReport]) -> str:
        """On which ranks: of one alone, with its device and process."""
        report = same[0]
        process = f"executor {report.executor}, pid {report.pid}"
        mesh = self._client.mesh_of(report.mesh)
        ranks = [r.rank for r in same if r.rank is not None]
        if not ranks or mesh is None:
            return f"on {process}"
        if len(ranks) > 1:
            return f"on {_ranks(ranks)} ({mesh.device_type})"
        return f"on rank {ranks[0]} ({mesh.device_type}:{mesh.ids[ranks[0]]}, {process})"

    def _ago(self, report: ErrorReport) -> str:
        n = max(0, self._client.writer.issued - report.ordinal - 1)
        return f"{n:,} command{'' if n == 1 else 's'} before this was asked for"

    def raise_of(self, sequence: int) -> None:
        """Raise the failure of command `sequence` itself, if it has failed."""
        if sequence in self._reports:
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
        with self._lock:
            untold = [found for s, found in sorted(self._reports.items()) if s not in self._asked]
            n = len(untold) + self._forgotten
            self._asked |= set(self._reports)
            self._forgotten = 0
        if n:
            log.error(
                "%d failed operation%s whose value nobody asked for%s",
                n,
                "" if n == 1 else "s",
                f"; the first: {self._told_shortly(untold[0])}" if untold else "",
            )
