"""Runs the programs of :mod:`dtorch.program`: this executor's part of a redistribution.

Every executor of a group runs the matching program at the same point of the one command order, so blocking
here cannot deadlock. Results are fresh tensors, never aliases of the inputs. A failure before or during a program
never leaves the peers waiting: this executor still takes part in every barrier, poisoned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..program import AllReduce, Cut, Exchange, Program, ReduceLine, ReduceScatter, Step
from .collectives import Comm
from .reducing import reducer
from .shm_collectives import Aborted, Group, narrow

__all__ = ["Failure", "run", "run_many"]

FUSE_BYTES = 256 << 10
"""Tensors up to this size share an exchange; above it, a copy more costs more than a barrier."""
BUCKET_BYTES = 8 << 20
"""Most bytes that share one exchange."""

Failure = bool | Exception
"""False: all went well. True: a peer came poisoned. An exception: it was raised here, and the peers know."""


def run(
    program: Program, locals: Sequence[Tensor] | None, comm: Comm, poison: bool = False
) -> tuple[list[Tensor], Failure]:
    """This executor's part of one redistribution.

    Args:
        program: made by ``plan_redistribute`` for this executor.
        locals: its shards of the source, in rank order; not looked at when poisoned.
        poison: take part as one whose input has failed.

    Returns:
        Its shards of the destination, in rank order, and whether anything failed here or at a peer; if so,
        the list is empty.

    Raises:
        Aborted: a peer died; the pool must be started anew.
    """
    failure: Failure = poison or locals is None
    tensors = list(locals or ())
    if program.slot != comm.slot:
        raise ValueError(f"a program for slots of {program.slot} bytes met executors with slots of {comm.slot} bytes")
    if not failure and program.order is not None:
        tensors = [t.permute(program.order) for t in tensors]
    for step in program.steps:
        if not failure:
            try:
                tensors, bad = _run_step(step, tensors, program.dtype, comm)
                failure = bool(bad)
                continue
            except Aborted:
                raise
            except _StepFailed as stop:
                # The peers were told within the step.
                failure = stop.error
                continue
        _skip(step, program.dtype, comm)
    if failure:
        return [], failure
    if program.order is not None:
        back = _inverse(program.order)
        tensors = [t.permute(back) for t in tensors]
    return tensors, False


def run_many(
    programs: Sequence[Program],
    locals: Sequence[Sequence[Tensor]] | None,
    comm: Comm,
    poison: bool = False,
) -> tuple[list[list[Tensor]], Failure]:
    """Several redistributions as one: small all_reduces of one group and dtype share an exchange.

    Which of them do follows from the programs alone, so that all executors agree. The failure of one is the
    failure of all. Args, results and raises are those of :func:`run`, one entry per program.
    """
    if len(programs) == 1:
        outs, failure = run(programs[0], None if locals is None else locals[0], comm, poison)
        return ([] if failure else [outs]), failure
    failure: Failure = poison or locals is None
    results: list[list[Tensor]] = [[] for _ in programs]
    buckets, alone = _buckets(programs)
    for bucket in buckets:
        parts = None if failure or locals is None else [locals[i] for i in bucket]
        made, failed = _run_bucket([programs[i] for i in bucket], parts, comm)
        failure = failure or failed
        for i, outs in zip(bucket, made, strict=False):
            results[i] = outs
    for i in alone:
        outs, failed = run(programs[i], None if failure or locals is None else locals[i], comm)
        failure = failure or failed
        results[i] = outs
    return ([] if failure else results), failure


class _StepFailed(Exception):
    """A step raised `error` before it arrived anywhere; the barriers of the step are done, poisoned."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _inverse(order: Sequence[int]) -> list[int]:
    back = [0] * len(order)
    for i, d in enumerate(order):
        back[d] = i
    return back


def _plain(t: Tensor) -> Tensor:
    """`t` without lazy conjugation or negation, which its bytes would not show."""
    return t.resolve_conj().resolve_neg() if t.is_complex() or t.is_neg() else t


# -- one step -------------------------------------------------------------------------------------------------------


def _run_step(step: Step, tensors: list[Tensor], dtype: torch.dtype, comm: Comm) -> tuple[list[Tensor], int]:
    try:
        begin = _PREPARE[type(step)](step, tensors, dtype, comm)
    except Exception as error:
        _skip(step, dtype, comm)
        raise _StepFailed(error) from error
    return begin()


def _skip(step: Step, dtype: torch.dtype, comm: Comm) -> None:
    """Take part in `step` as one that has failed."""
    if isinstance(step, Exchange):
        if step.group is not None:
            comm.shared(*step.group).exchange((), (), step.rounds, 1)
    elif isinstance(step, AllReduce):
        for line in step.lines:
            if line.group is not None:
                count = prod(step.outs[line.outs[0]])
                comm.shared(*line.group).all_reduce((), None, line.rows, step.op, step.divisor, count, dtype, 1)
    else:
        for line in step.lines:
            comm.shared(*line.group).reduce_scatter(
                None, None, line.rows, line.cuts, line.shapes, step.op, step.divisor, dtype, 1
            )


# What may fail (allocation, a wrong shape) is done when a step is prepared, before this executor arrives at
# any barrier; the function that comes back only moves data.
_Begin = Callable[[], tuple[list[Tensor], int]]


def _exchange(step: Exchange, tensors: list[Tensor], dtype: torch.dtype, comm: Comm) -> _Begin:
    zeros = step.zeros
    outs = [
        torch.zeros(shape, dtype=dtype) if i in zeros else torch.empty(shape, dtype=dtype)
        for i, shape in enumerate(step.outs)
    ]
    if dtype.is_complex:
        tensors = [_plain(t) for t in tensors]
    copies = [(narrow(outs[c.out], c.out_cut), narrow(tensors[c.src], c.src_cut)) for c in step.copies]
    group = None if step.group is None else comm.shared(*step.group)
    writes = [(narrow(tensors[w.src], w.cut), w.round, w.offset, w.readers) for w in step.writes]
    landed = [
        narrow(outs[r.out], r.cut) if r.out >= 0 else torch.empty(r.shape, dtype=dtype) for r in step.reads
    ]
    reads = [(r.member, r.round, r.offset, to) for r, to in zip(step.reads, landed, strict=True)]
    reduces = [
        (
            narrow(outs[r.out], r.cut),
            [narrow(tensors[i], cut) if i >= 0 else landed[-1 - i] for i, cut in r.terms],
        )
        for r in step.reduces
    ]

    def begin() -> tuple[list[Tensor], int]:
        bad = 0
        if group is not None:
            bad = group.exchange(writes, reads, step.rounds)
        if not bad:
            for to, source in copies:
                to.copy_(source)
            for to, terms in reduces:
                reducer(dtype, step.op, step.divisor, len(terms))(to, terms)
        return outs, bad

    return begin


def _flat(tensors: list[Tensor], which: tuple[int, Cut]) -> Tensor:
    t = narrow(tensors[which[0]], which[1])
    if t.is_complex() or not t.is_contiguous():
        t = _plain(t).contiguous()
    return t.view(-1)


def _all_reduce(step: AllReduce, tensors: list[Tensor], dtype: torch.dtype, comm: Comm) -> _Begin:
    outs = [torch.empty(shape, dtype=dtype) for shape in step.outs]
    parts: list[tuple[ReduceLine, Group | None, list[Tensor]]] = []
    for line in step.lines:
        group = None if line.group is None else comm.shared(*line.group)
        parts.append((line, group, [_flat(tensors, which) for which in line.mine]))

    def begin() -> tuple[list[Tensor], int]:
        bad = 0
        for line, group, mine in parts:
            out = outs[line.outs[0]].view(-1)
            bad |= _reduce_line(group, mine, out, line.rows, step, dtype, bad)
            if not bad:
                for i in line.outs[1:]:
                    outs[i].copy_(outs[line.outs[0]])
        return outs, bad

    return begin


def _reduce_line(
    group: Group | None,
    mine: list[Tensor],
    out: Tensor,
    rows: tuple[tuple[int, int], ...],
    step: AllReduce,
    dtype: torch.dtype,
    poison: int = 0,
) -> int:
    if group is None:
        reducer(dtype, step.op, step.divisor, len(rows))(out, [mine[row] for _, row in rows])
        return poison
    return group.all_reduce(mine, out, rows, step.op, step.divisor, out.numel(), dtype, poison)


def _reduce_scatter(step: ReduceScatter, tensors: list[Tensor], dtype: torch.dtype, comm: Comm) -> _Begin:
    outs = [torch.empty(shape, dtype=dtype) for shape in step.outs]
    if dtype.is_complex:
        tensors = [_plain(t) for t in tensors]
    groups = [comm.shared(*line.group) for line in step.lines]

    def begin() -> tuple[list[Tensor], int]:
        bad = 0
        for line, group in zip(step.lines, groups, strict=True):
            bad |= group.reduce_scatter(
                tensors[line.src], outs[line.out], line.rows, line.cuts, line.shapes, step.op, step.divisor, dtype, bad
            )
        return outs, bad

    return begin


_PREPARE: dict[type[Step], Callable[[Any, list[Tensor], torch.dtype, Comm], _Begin]] = {
    Exchange: _exchange,
    AllReduce: _all_reduce,
    ReduceScatter: _reduce_scatter,
}


# -- several all_reduces as one -------------------------------------------------------------------------------------


def _line(program: Program) -> tuple[AllReduce, ReduceLine]:
    step = program.steps[0]
    assert isinstance(step, AllReduce)
    return step, step.lines[0]


def _buckets(programs: Sequence[Program]) -> tuple[list[list[int]], list[int]]:
    """Indices of the programs that run together, and of those that run alone."""
    open_buckets: dict[Any, list[int]] = {}
    filled: dict[Any, int] = {}
    buckets: list[list[int]] = []
    alone: list[int] = []
    for i, program in enumerate(programs):
        if program.fusable:
            step, line = _line(program)
            nbytes = prod(step.outs[line.outs[0]]) * program.dtype.itemsize
            if nbytes <= FUSE_BYTES:
                key = (line.group, line.rows, program.dtype, step.op, step.divisor)
                if key not in open_buckets or filled[key] + nbytes > BUCKET_BYTES:
                    open_buckets[key] = []
                    filled[key] = 0
                    buckets.append(open_buckets[key])
                open_buckets[key].append(i)
                filled[key] += nbytes
                continue
        alone.append(i)
    return buckets, alone


def _run_bucket(
    programs: Sequence[Program], locals: Sequence[Sequence[Tensor]] | None, comm: Comm
) -> tuple[list[list[Tensor]], Failure]:
    step, line = _line(programs[0])
    dtype = programs[0].dtype
    shapes = [_line(p)[0].outs[0] for p in programs]
    counts = [prod(s) for s in shapes]
    total = sum(counts)
    group = None if line.group is None else comm.shared(*line.group)

    def skip(failure: Failure) -> tuple[list[list[Tensor]], Failure]:
        if group is not None:
            group.all_reduce((), None, line.rows, step.op, step.divisor, total, dtype, 1)
        return [], failure

    if locals is None:
        return skip(True)
    try:
        rows: list[Tensor] = []
        for row in range(len(line.mine)):
            flats: list[Tensor] = []
            for program, tensors in zip(programs, locals, strict=True):
                which = _line(program)[1].mine[row]
                t = tensors[which[0]]
                if program.order is not None:
                    t = t.permute(program.order)
                flats.append(_flat([t], (0, which[1])))
            rows.append(torch.cat(flats))
        out = torch.empty(total, dtype=dtype)
        copies = [[torch.empty(s, dtype=dtype) for _ in line.outs] for s in shapes]
    except Exception as error:
        return skip(error)
    if _reduce_line(group, rows, out, line.rows, step, dtype):
        return [], True
    for piece, shape, made in zip(out.split(counts), shapes, copies, strict=True):
        for t in made:
            t.copy_(piece.view(shape))
    return [
        made if p.order is None else [t.permute(_inverse(p.order)) for t in made]
        for p, made in zip(programs, copies, strict=True)
    ], False


