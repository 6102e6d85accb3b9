"""Runs the programs of :mod:`dtorch.program`: this executor's part of a redistribution.

Every executor of a group runs the matching program at the same point of the one command order, so blocking
here cannot deadlock. Results are fresh tensors, never aliases of the inputs. A failure before or during a program
never leaves the peers waiting: this executor still takes part in every barrier, poisoned.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..program import AllReduce, Cut, Exchange, Program, ReduceLine, ReduceScatter
from .collectives import Comm
from .device import DeviceError
from .ready import Ready, make_ready
from .reducing import reducer
from .shm_collectives import Aborted, Group, narrow

__all__ = ["Failure", "run", "run_many"]

FUSE_BYTES = 256 << 10
"""Tensors up to this size share an exchange; above it, a copy more costs more than a barrier."""
BUCKET_BYTES = 8 << 20
"""Most bytes that share one exchange."""

_READY = 4096

HUGE_BYTES = 4 << 20
"""From here on results are put on huge pages: faulting in 4 KiB pages would cost more than the copy."""

Failure = bool | Exception
"""False: all went well. True: a peer came poisoned. An exception: it was raised here, and the peers know."""

Tell = Callable[[Exception, int], object]
"""Given an error that was raised here, and the caller's number for the move, before any peer can learn of it."""


def _nobody(error: Exception, place: int) -> None:
    pass


def run(
    program: Program,
    locals: Sequence[Tensor] | None,
    comm: Comm,
    poison: bool = False,
    tell: Tell = _nobody,
    place: int = 0,
) -> tuple[list[Tensor], Failure]:
    """This executor's part of one redistribution.

    Args:
        program: made by ``plan_redistribute`` for this executor.
        locals: its shards of the source, in rank order; not looked at when poisoned.
        poison: take part as one whose input has failed.
        tell, place: see :data:`Tell`.

    Returns:
        Its shards of the destination, in rank order, and whether anything failed here or at a peer; if so,
        the list is empty.

    Raises:
        Aborted: a peer died; the pool must be started anew.
        DeviceError: peers wait for what will not come, and cannot be told; this executor must end.
    """
    ready = comm.ready.get(id(program)) or _make_ready(program, comm)
    fast, meetings = ready[1:]
    if fast is not None and locals and not poison:
        group = meetings[0][0] if meetings else None
        start = 0 if group is None else group.sequence
        try:
            out, bad = fast(locals[0])
            return ([], True) if bad else ([out], False)
        except (Aborted, DeviceError):
            raise
        except Exception as error:
            tell(error, place)
            if group is not None:
                group.catch_up(start + 1)
            return [], error
    starts = [(group, group.sequence) for group, _ in meetings]
    failure: Failure = poison or locals is None
    tensors: list[Tensor] = []
    if not failure:
        try:
            tensors, failure = _run_steps(program, locals or (), comm)
        except (Aborted, DeviceError):
            raise
        except Exception as error:
            tell(error, place)
            failure = error
    if not failure:
        return tensors, False
    # Wherever this executor stopped, its peers go on to the end: so does it, poisoned.
    targets = dict(starts)
    for group, rounds in meetings:
        targets[group] += rounds
        group.catch_up(targets[group])
    return [], failure


def run_many(
    programs: Sequence[Program],
    locals: Sequence[Sequence[Tensor]] | None,
    comm: Comm,
    poison: bool = False,
    tell: Tell = _nobody,
    place: int = 0,
) -> tuple[list[list[Tensor]], Failure]:
    """Several redistributions as one: small all_reduces of one group and dtype share an exchange.

    Which of them do follows from the programs alone, so that all executors agree. The failure of one is the
    failure of all. Args, results and raises are those of :func:`run`, one entry per program.
    """
    if len(programs) == 1:
        outs, failure = run(programs[0], None if locals is None else locals[0], comm, poison, tell, place)
        return ([] if failure else [outs]), failure
    failure: Failure = poison or locals is None
    results: list[list[Tensor]] = [[] for _ in programs]
    buckets, alone = _buckets(programs)
    for bucket in buckets:
        parts = None if failure or locals is None else [locals[i] for i in bucket]
        made, failed = _run_bucket([programs[i] for i in bucket], parts, comm, tell, place)
        failure = failure or failed
        for i, outs in zip(bucket, made, strict=False):
            results[i] = outs
    for i in alone:
        outs, failed = run(programs[i], None if failure or locals is None else locals[i], comm, False, tell, place)
        failure = failure or failed
        results[i] = outs
    return ([] if failure else results), failure


def _make_ready(program: Program, comm: Comm) -> tuple[Program, Ready | None, list[tuple[Group, int]]]:
    """What is known of `program` beforehand: its fast path, and how often it meets which group, in order."""
    if program.slot != comm.slot:
        raise ValueError(f"a program for slots of {program.slot} bytes met executors with slots of {comm.slot} bytes")
    meetings: list[tuple[Group, int]] = []
    for step in program.steps:
        if isinstance(step, Exchange):
            if step.group is not None:
                group = comm.shared(*step.group)
                meetings.append((group, group.exchange_rounds(step.rounds)))
        elif isinstance(step, AllReduce):
            for line in step.lines:
                if line.group is not None:
                    group = comm.shared(*line.group)
                    count = prod(step.outs[line.outs[0]])
                    meetings.append((group, group.all_reduce_rounds(line.rows, count, program.dtype)))
        else:
            for line in step.lines:
                group = comm.shared(*line.group)
                meetings.append((group, group.reduce_scatter_rounds(line.shapes, program.dtype)))
    if len(comm.ready) >= _READY:
        comm.ready.clear()
    try:
        fast = make_ready(program, comm)
    except Exception:  # no memory, say: the general way works, or tells the peers that it does not
        return program, None, meetings
    # The program is kept with what is known of it: its id must not pass to another.
    found = comm.ready[id(program)] = (program, fast, meetings)
    return found


def _inverse(order: Sequence[int]) -> list[int]:
    back = [0] * len(order)
    for i, d in enumerate(order):
        back[d] = i
    return back


_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A new tensor, on huge pages where it is large."""
    t = torch.empty(shape, dtype=dtype)
    if t.nbytes >= HUGE_BYTES and t.is_cpu:
        start = -(-t.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        # Advice only: where it is refused the tensor is as good as any.
        _madvise(start, t.data_ptr() + t.nbytes - start, mmap.MADV_HUGEPAGE)
    return t


def _plain(t: Tensor) -> Tensor:
    """`t` without lazy conjugation or negation, which its bytes would not show."""
    return t.resolve_conj().resolve_neg() if t.is_complex() or t.is_neg() else t


# -- steps ----------------------------------------------------------------------------------------------------------

# Outputs are allocated before this executor arrives anywhere: what may fail has then failed while the peers can
# still be told.


def _run_steps(program: Program, locals: Sequence[Tensor], comm: Comm) -> tuple[list[Tensor], bool]:
    tensors = list(locals)
    if program.order is not None:
        tensors = [t.permute(program.order) for t in tensors]
    for step in program.steps:
        if isinstance(step, Exchange):
            tensors, bad = _exchange(step, tensors, program.dtype, comm)
        elif isinstance(step, AllReduce):
            tensors, bad = _all_reduce(step, tensors, program.dtype, comm)
        else:
            tensors, bad = _reduce_scatter(step, tensors, program.dtype, comm)
        if bad:
            return [], True
    if program.order is not None:
        back = _inverse(program.order)
        tensors = [t.permute(back) for t in tensors]
    return tensors, False


def _exchange(step: Exchange, tensors: list[Tensor], dtype: torch.dtype, comm: Comm) -> tuple[list[Tensor], int]:
    zeros = step.zeros
    outs = [
        torch.zeros(shape, dtype=dtype) if i in zeros else _empty(shape, dtype) for i, shape in enumerate(step.outs)
    ]
    if dtype.is_complex:
        tensors = [_plain(t) for t in tensors]
    landed = [narrow(outs[r.out], r.cut) if r.out >= 0 else _empty(r.shape, dtype) for r in step.reads]
    if step.group is not None:
        writes = [(narrow(tensors[w.src], w.cut), w.round, w.offset, w.readers) for w in step.writes]
        reads = [(r.member, r.round, r.offset, to) for r, to in zip(step.reads, landed, strict=True)]
        if comm.shared(*step.group).exchange(writes, reads, step.rounds):
            return [], 1
    for c in step.copies:
        narrow(outs[c.out], c.out_cut).copy_(narrow(tensors[c.src], c.src_cut))
    for r in step.reduces:
        terms = [narrow(tensors[i], cut) if i >= 0 else landed[-1 - i] for i, cut in r.terms]
        reducer(dtype, step.op, step.divisor, len(terms))(narrow(outs[r.out], r.cut), terms)
    for i, like in step.repeats:
        outs[i].copy_(outs[like])
    return outs, 0


def _flat(t: Tensor, cut: Cut) -> Tensor:
    t = narrow(t, cut)
    if t.is_complex() or not t.is_contiguous():
        t = _plain(t).contiguous()
    return t.view(-1)


def _all_reduce(step: AllReduce, tensors: list[Tensor], dtype: torch.dtype, comm: Comm) -> tuple[list[Tensor], int]:
    outs = [_empty(shape, dtype) for shape in step.outs]
    rows = [[_flat(tensors[i], cut) for i, cut in line.mine] for line in step.lines]
    for line, mine in zip(step.lines, rows, strict=True):
        out = outs[line.outs[0]]
        if _reduce_line(line, mine, out.view(-1), step, comm):
            return [], 1
        for i in line.outs[1:]:
            outs[i].copy_(out)
    return outs, 0


def _reduce_line(line: ReduceLine, mine: list[Tensor], out: Tensor, step: AllReduce, comm: Comm) -> int:
    if line.group is not None:
        return comm.shared(*line.group).all_reduce(mine, out, line.rows, step.op, step.divisor)
    reducer(out.dtype, step.op, step.divisor, len(line.rows))(out, [mine[row] for _, row in line.rows])
    return 0


def _reduce_scatter(
    step: ReduceScatter, tensors: list[Tensor], dtype: torch.dtype, comm: Comm
) -> tuple[list[Tensor], int]:
    outs = [_empty(shape, dtype) for shape in step.outs]
    if dtype.is_complex:
        tensors = [_plain(t) for t in tensors]
    for line in step.lines:
        group = comm.shared(*line.group)
        out = outs[line.out]
        if group.reduce_scatter(tensors[line.src], out, line.rows, line.cuts, line.shapes, step.op, step.divisor):
            return [], 1
    return outs, 0


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
    programs: Sequence[Program], locals: Sequence[Sequence[Tensor]] | None, comm: Comm, tell: Tell, place: int
) -> tuple[list[list[Tensor]], Failure]:
    step, line = _line(programs[0])
    dtype = programs[0].dtype
    shapes = [_line(p)[0].outs[0] for p in programs]
    counts = [prod(s) for s in shapes]
    total = sum(counts)
    group = None if line.group is None else comm.shared(*line.group)
    target = 0 if group is None else group.sequence + group.all_reduce_rounds(line.rows, total, dtype)
    failure: Failure = locals is None
    if locals is not None:
        try:
            rows: list[Tensor] = []
            for row in range(len(line.mine)):
                flats: list[Tensor] = []
                for program, tensors in zip(programs, locals, strict=True):
                    i, cut = _line(program)[1].mine[row]
                    t = tensors[i] if program.order is None else tensors[i].permute(program.order)
                    flats.append(_flat(t, cut))
                rows.append(torch.cat(flats))
            out = torch.empty(total, dtype=dtype)
            copies = [[torch.empty(s, dtype=dtype) for _ in line.outs] for s in shapes]
            failure = bool(_reduce_line(line, rows, out, step, comm))
            if not failure:
                return _parted(programs, out.split(counts), copies), False
        except (Aborted, DeviceError):
            raise
        except Exception as error:
            tell(error, place)
            failure = error
    if group is not None:
        group.catch_up(target)
    return [], failure


def _parted(programs: Sequence[Program], pieces: Sequence[Tensor], copies: list[list[Tensor]]) -> list[list[Tensor]]:
    """The results in a bucket, each in memory of its own."""
    for piece, made in zip(pieces, copies, strict=True):
        for t in made:
            t.copy_(piece.view(t.shape))
    return [
        made if p.order is None else [t.permute(_inverse(p.order)) for t in made]
        for p, made in zip(programs, copies, strict=True)
    ]
