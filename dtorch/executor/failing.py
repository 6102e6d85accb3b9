"""What an executor does about failures: poison what depends on them, keep what a write did not reach, tell the client.

A failure leaves a plan as an ordinary exception; nothing here runs before one does. Three rules:

* what a failed command should have made is poisoned, and so is all that is made from that;
* a write that was not done, its input having failed, leaves the target's value beneath the poison, until the client
  clears its errors;
* the client is told of a failure before anyone can see a poisoned value.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from ..runtime import command
from ..runtime.command import (
    LOST_WITH_POOL,
    LOST_WRITE,
    OVERWRITES,
    CallPlan,
    Cause,
    ClearErrors,
    Dropped,
    ErrorReport,
    FetchFailed,
    FetchPlan,
    PickPlan,
    RedistributePlan,
    Renew,
    Reply,
    Settle,
)
from ..runtime.shared import DEAD, DEAD_POOL, ERROR, EXECUTOR_DONE, EXECUTOR_READ, SharedState, executor_line
from ..runtime.transport import describe, full_traceback
from .compiler import compile_call
from .device import Device
from .store import Poison, shards, sharing

__all__ = ["Failing", "PeerFailedError", "first_poison", "one_of"]

# Writes that torch does element by element and may leave half done. So may any list of tensors.
_SCATTERS = frozenset(
    "index_put_ _index_put_impl_ index_add_ index_copy_ index_fill_ index_reduce_ put_ scatter_ scatter_add_ "
    "scatter_reduce_".split()
)

_NEVER_MADE = Poison(LOST_WITH_POOL)


class PeerFailedError(Exception):
    """A collective was poisoned by a peer."""


class Failing:
    """One executor's failures.

    Args:
        index: this executor's number in the pool.
        state: the pool's shared memory.
        send: hands bytes to the client's reply ring.
        store: ref → value.
        messages: plan id → the message that defined it.
        mine: mesh id → the ranks on this executor.
        run_again: runs the record of a plan at a word of the ring.
        device: where values lie.
    """

    def __init__(
        self,
        index: int,
        state: SharedState,
        send: Callable[[bytes], None],
        store: dict[int, Any],
        messages: dict[int, Any],
        mine: dict[int, tuple[int, ...]],
        run_again: Callable[[int, int], None],
        device: Device,
    ) -> None:
        self.index, self.state = index, state
        self._send, self._store, self._messages, self._mine, self._run_again = send, store, messages, mine, run_again
        self._words, self._device = state.ring_words, device
        # An error of the command that runs, of which the client knows already.
        self._told: Exception | None = None
        # Failed command -> how many values are poisoned on its account.
        self._held: dict[int, int] = {}

    # -- when a command fails -----------------------------------------------------------------------------------

    def failed(self, plan: int, p: int, error: BaseException) -> None:
        """The record of `plan` at word `p` raised `error`: poison what it should have made or written."""
        message = self._messages.get(plan)
        if message is None:
            self.report(self.sequence(p), error, None, 0, "a control command")
            return
        outs, ins = self.refs(message, p)
        # A redistribution looks at its inputs itself: not every executor of its two meshes has them.
        looked_at = () if isinstance(message, RedistributePlan) else ins
        poison = first_poison([self.value(r) for r in looked_at])
        if poison is not None and self._overwritten(message, ins, plan, p):
            return
        ranks = self._mine.get(getattr(message, "mesh", 0), ())
        done = _ranks_done(error.__traceback__)
        half = False
        if isinstance(error, PeerFailedError):
            # The peers have told the client why.
            poison = Poison(self.sequence(p))
        elif poison is None:
            rank = ranks[done] if done < len(ranks) else ranks[0] if len(ranks) == 1 else None
            poison = Poison(self.sequence(p))
            if error is not self._told:
                self.report(poison.sequence, error, rank, getattr(message, "mesh", 0), getattr(message, "text", ""))
            self._told = None
            half = _may_be_half_done(message, done)
            if isinstance(message, CallPlan) and done < len(ranks):
                self._try_others(message, ins, p, poison.sequence, ranks, done + 1)
        for ref in outs:
            self._store[ref] = self.poisoned(poison.sequence)
        if isinstance(message, FetchPlan):
            self.fail_fetch(p, poison)
        elif isinstance(message, CallPlan):
            self._not_written([ins[i] for i in message.writes], poison, message.mesh, half)
            if message.draws:
                self._pass_draw(message, ranks[0], p, len(outs) + len(ins))

    def failed_in_exchange(self, message: RedistributePlan, p: int, error: Exception) -> None:
        """The exchange at word `p` has raised `error`, which :meth:`failed` gets when the peers have been told.

        The client is told first: whoever asks a peer for its value is to learn why there is none.
        """
        ranks = self._mine.get(message.source, ())
        with contextlib.suppress(Exception):  # peers wait meanwhile
            rank = ranks[0] if len(ranks) == 1 else None
            self.report(self.sequence(p), error, rank, message.source, message.text)
            self._told = error

    def ending(self) -> bool:
        """Whether this process is being ended: a SystemExit is not the user's then."""
        return bool(self.state.control[DEAD] & DEAD_POOL)

    def value(self, ref: int) -> Any:
        """What is stored under `ref`; a ref nobody knows here is of a pool that has ended."""
        return self._store.get(ref, _NEVER_MADE)

    def sequence(self, p: int) -> int:
        """The record at word `p` of the ring as the client names it: its position since the pool began."""
        read = self.state.control[executor_line(self.index) + EXECUTOR_READ]
        return read + ((p - read) & (len(self._words) - 1))

    def refs(self, message: Any, p: int) -> tuple[list[int], list[int]]:
        """Refs of the outputs and of the inputs of a record."""
        if isinstance(message, CallPlan):
            n, k = sum(message.outputs), message.inputs
        elif isinstance(message, RedistributePlan):
            n = k = message.count
        elif isinstance(message, FetchPlan):
            n, k = 0, 1
        elif isinstance(message, PickPlan):
            n, k = 1, 1
        else:
            n, k = 1, 0
        words = self._words
        return list(words[p + 1 : p + 1 + n]), list(words[p + 1 + n : p + 1 + n + k])

    def report(self, sequence: int, error: BaseException, rank: int | None, mesh: int, text: str) -> None:
        """Tell the client of a failure: the error and its traceback as plain values."""
        self.tell(
            ErrorReport(
                sequence=sequence,
                executor=self.index,
                rank=rank,
                told=describe(error),
                traceback=full_traceback(error),
                text=text,
                mesh=mesh,
                pid=os.getpid(),
                ordinal=self.state.control[executor_line(self.index) + EXECUTOR_DONE],
            )
        )

    def _try_others(
        self, m: CallPlan, ins: list[int], p: int, sequence: int, ranks: tuple[int, ...], start: int
    ) -> None:
        """Run the ranks of this executor after the one that failed, to tell which of them fail as well.

        What they make is not used, so only what writes nothing and draws nothing is run.
        """
        if m.writes or m.draws:
            return
        numbers = self._numbers(m, p + 1 + sum(m.outputs) + len(ins))
        columns = [shards(self.value(r)) for r in ins]
        for k in range(start, len(ranks)):
            call = compile_call(m.calls[m.which[ranks[k]]], m.inputs, len(m.numbers), None, False, self._device)
            try:
                call(*(c[k] for c in columns), *numbers)
            except BaseException as error:
                if self.ending():
                    raise
                self.report(sequence, error, ranks[k], m.mesh, m.text)

    def _numbers(self, m: CallPlan, base: int) -> list[int | float]:
        """The numbers of a record, which begin at word `base`."""
        return [
            (self.state.ring_ints if k == "q" else self.state.ring_doubles)[base + i] for i, k in enumerate(m.numbers)
        ]

    def tell(self, message: object) -> None:
        """Send a message to the client."""
        self._send(command.encode(message))

    def fail_fetch(self, p: int, poison: Poison) -> None:
        """Answer the fetch at word `p`: there is no value."""
        slot, generation = self._words[p + 2], self._words[p + 3]
        self.tell(FetchFailed(slot, generation, poison.sequence))
        self.state.control[slot + self.index] = generation << 2 | ERROR

    def poisoned_move(self, p: int, outs: Iterable[int], poison: Poison) -> None:
        """A redistribution met a poisoned input: its outputs are poisoned here, and the peers' through the exchange.

        To be called before it, so that the client knows the cause before any peer can be asked for it.
        """
        self.tell(Cause(self.sequence(p), poison.sequence))
        for ref in outs:
            self._store[ref] = self.poisoned(poison.sequence)

    def poisoned(self, sequence: int, mesh: int = 0, old: Any = None, half: bool = False) -> Poison:
        """A :class:`Poison` for the store. The client is told when the last one of a failure is dropped."""
        self._held[sequence] = self._held.get(sequence, 0) + 1
        return Poison(sequence, mesh, old, half, self._forgotten)

    def _forgotten(self, sequence: int) -> None:
        left = self._held.pop(sequence, 0) - 1
        if left > 0:
            self._held[sequence] = left
            return
        with contextlib.suppress(Exception):  # at the end of this process, the way to the client may be gone
            self.tell(Dropped(sequence))

    # -- writes that were not done ------------------------------------------------------------------------------

    def _not_written(self, targets: list[int], poison: Poison, mesh: int, half: bool) -> None:
        values = [v for r in targets if type(v := self._store.get(r)) is not Poison and v is not None]
        if not values:
            return
        # Views of a target, and what it is a view of, lie in the same memory: they were not written either.
        for ref in sharing(self._store, values):
            found = self._store[ref]
            if type(found) is Poison:
                found.half |= half
            else:
                self._store[ref] = self.poisoned(poison.sequence, mesh, found, half)

    def _overwritten(self, message: Any, ins: list[int], plan: int, p: int) -> bool:
        """Whether the command replaces a poisoned target as a whole, by a good value: it is then done after all."""
        if not isinstance(message, CallPlan) or message.calls[0].func not in OVERWRITES or len(set(ins)) < len(ins):
            return False
        target = self._store.get(ins[0])
        if type(target) is not Poison or target.old is None or any(type(self.value(r)) is Poison for r in ins[1:]):
            return False
        old = shards(target.old)
        if any(t.nbytes != t.untyped_storage().nbytes() for t in old):
            return False  # the rest of the memory would stay as it was
        covered = {r: v for r in sharing(self._store, [target.old]) if type(v := self._store[r]) is Poison}
        for ref, found in covered.items():
            self._store[ref] = found.old
        try:
            self._run_again(plan, p)
        except Exception:  # not done after all: poisoned as before, for the reason it had
            self._store.update(covered)
            return False
        return True

    def renew(self, m: Renew) -> None:
        """Memory for a value that ended with its pool: nobody may read it before it has been written as a whole."""
        made = [self._device.empty(m.layouts[rank]) for rank in self._mine.get(m.mesh, ())]
        if made:
            self._store[m.ref] = Poison(LOST_WITH_POOL, m.mesh, made[0] if len(made) == 1 else made, True)

    def clear(self, message: ClearErrors) -> None:
        """Tell the client which values stand beneath poison: (ref, mesh, whether it was left untouched)."""
        kept = [(ref, v.mesh, not v.half) for ref, v in self._store.items() if type(v) is Poison and v.old is not None]
        self.tell(Reply(message.token, kept))

    def settle(self, message: Settle) -> None:
        """The client has compared what all ranks kept: their values stand again, or are lost."""
        for ref in message.kept:
            found = self._store.get(ref)
            if type(found) is Poison:
                self._store[ref] = found.old
        for ref in message.lost:
            found = self._store.get(ref)
            if type(found) is Poison:
                why = found.sequence if found.sequence == LOST_WITH_POOL else LOST_WRITE
                self._store[ref] = Poison(why, found.mesh, found.old, True)
            elif found is not None:
                self._store[ref] = Poison(LOST_WRITE, 0, found, True)

    # -- random numbers -----------------------------------------------------------------------------------------

    def _pass_draw(self, m: CallPlan, rank: int, p: int, refs: int) -> None:
        """Move the generator as the draw that failed would have: the peers' have moved, and all must stay alike."""
        numbers = self._numbers(m, p + 1 + refs)
        inputs = [self._device.empty((shape, None, dtype)).fill_(1) for shape, dtype in m.layouts[rank]]
        try:
            compile_call(m.calls[m.which[rank]], m.inputs, len(m.numbers), None, True, self._device)(*inputs, *numbers)
        except BaseException:  # wrong numbers: then no rank has drawn
            if self.ending():
                raise


def _ranks_done(trace: TracebackType | None) -> int:
    """How many ranks of this executor had run the command when it raised."""
    while trace is not None:
        frame = trace.tb_frame
        # Asked of no other frame: its locals, once looked at, keep what they refer to for as long as it runs, and
        # that of the executor's loop runs for ever.
        if "ranks_done" in frame.f_code.co_varnames and (made := frame.f_locals.get("ranks_done")) is not None:
            return len(made)
        trace = trace.tb_next
    return 0


def first_poison(values: list[Any]) -> Poison | None:
    """Of the failures behind `values`, the one to blame: the first, in the order of the program."""
    return min((v for v in values if type(v) is Poison), key=lambda v: v.sequence, default=None)


def one_of(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The one of `ranks` whose call runs, where the calling thread is inside it; else all."""
    frame = sys._getframe(1)
    while frame is not None:
        if "ranks_done" in frame.f_code.co_varnames:
            made = frame.f_locals.get("ranks_done")
            return ranks[len(made) : len(made) + 1] or ranks if made is not None else ranks
        frame = frame.f_back
    return ranks


def _may_be_half_done(message: Any, ranks_done: int) -> bool:
    """Whether a command that raised by itself may have written part of its targets."""
    if not isinstance(message, CallPlan) or not message.writes:
        return False
    func = message.calls[0].func
    stem = func.split(".")[1]
    return ranks_done > 0 or len(message.writes) > 1 or func.startswith("dtorch.") or stem in _SCATTERS
