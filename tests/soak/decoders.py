"""Bytes for everything that reads bytes: reply rings, messages of the warden, commands. Refused, or read; no more."""

from __future__ import annotations

import json
import os
import random
import resource
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dtorch.executor.messages import receive, send
from dtorch.executor.pool import Pool
from dtorch.runtime import command
from dtorch.runtime.command import CallPlan, Dropped, FetchFailed, LocalCall, Reply
from dtorch.runtime.config import Config
from dtorch.runtime.reply import _REPLY_WRITE, ReplyReader, ReplyWriter, reply_memfd

from .parts import Violation

__all__ = ["Trials", "spoiled"]

_EACH = 100
# A length made of noise is refused, not served.
_ADDRESS_SPACE = 8 << 30
_SLOWEST = 5.0


class Trials:
    """No process is started."""

    def __init__(self) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))

    def trial(self, seed: int) -> float:
        lots = random.Random(seed)
        began = time.monotonic()
        fuzz = lots.choice([reply_ring, commands, socket_messages, warden_messages])
        for _ in range(_EACH):
            start = time.monotonic()
            fuzz(lots)
            if time.monotonic() - start > _SLOWEST:
                raise Violation(f"{fuzz.__name__} took {time.monotonic() - start:.1f} s for one input")
        return time.monotonic() - began

    def close(self) -> Iterator[str]:
        yield from ()


def spoiled(lots: random.Random, data: bytes) -> bytes:
    """`data` cut, with bits turned over, or with bytes of noise in it."""
    out = bytearray(data)
    kind = lots.randrange(4)
    if kind == 0:
        return bytes(out[: lots.randrange(len(out) + 1)])
    if kind == 1:
        for _ in range(lots.randint(1, 4)):
            out[lots.randrange(len(out))] ^= 1 << lots.randrange(8)
    elif kind == 2:
        at = lots.randrange(len(out))
        out[at : at + lots.randint(1, 16)] = lots.randbytes(lots.randint(0, 16))
    else:
        out = bytearray(lots.randbytes(lots.randint(0, 100)))
    return bytes(out)


def _refused_or_read(use: Callable[[], Any], *refusals: type[Exception]) -> Any:
    try:
        return use()
    except refusals:
        return None


def reply_ring(lots: random.Random) -> None:
    """Every word and index of a ring; whole messages that were written before are read as they were."""
    fd = reply_memfd(1 << 12)
    writer, reader = ReplyWriter(fd), ReplyReader(fd)
    try:
        before = [lots.randbytes(lots.randint(0, 300)) for _ in range(lots.randint(0, 5))]
        for message in before:
            writer.send(message)
        intact = writer._words[_REPLY_WRITE]
        for _ in range(lots.randint(0, 3)):
            writer.send(lots.randbytes(lots.randint(0, 300)))
        words = writer._words
        for _ in range(lots.randint(1, 20)):
            if lots.random() < 0.3:
                words[_REPLY_WRITE] = lots.choice([intact + lots.randrange(600), lots.getrandbits(64), 0])
            else:
                words[16 + (intact + lots.randrange(400)) % 512] = lots.choice(
                    [lots.getrandbits(64), lots.randrange(600)]
                )
        got = _refused_or_read(reader.drain, ValueError)
        if got is not None and words[_REPLY_WRITE] >= intact and got[: len(before)] != before:
            raise Violation(f"messages of {[len(m) for m in before]} bytes were read as {[len(m) for m in got]}")
        _refused_or_read(reader.drain, ValueError)  # again: no loop either
    finally:
        del words
        writer.close()
        reader.close()
        os.close(fd)


MESSAGES: list[object] = [
    Reply(5, {"rows": [1, 2, 3]}),
    Dropped(77),
    FetchFailed(100, 3, 4000),
    CallPlan(
        20, 1, (LocalCall("aten.add.Tensor", (command.In(0), 1.5), {}, (None,), (((4, 4), None, torch.float32),)),),
        (0, 0), 1, "q", (True,), (), "add(float32[8, 4])",
    ),
]  # fmt: skip


def commands(lots: random.Random) -> None:
    """Pickled messages: an exception is all that may come of them."""
    data = command.encode(lots.choice(MESSAGES))
    # Whoever reads them takes any exception for a refusal: see Client.drain, and the executor's loop.
    _refused_or_read(lambda: command.decode(spoiled(lots, data)), Exception)


def _message(lots: random.Random) -> bytes:
    events: list[Any] = [
        {"event": "hello", "threads": 1, "seconds": 0.5},
        {"event": "forked", "executors": [[0, 100], [1, 101]]},
        {"event": "died", "executor": 0, "pid": 100, "reason": "ended with exit code 3", "stderr": ["a", "b"]},
        {"event": "refused", "executor": 1, "error": "no memory"},
    ]
    event = lots.choice(events)
    if lots.random() < 0.5:
        event = {
            k: lots.choice([v, None, [], 7, "x", {"a": 1}, [[1]]]) for k, v in event.items() if lots.random() < 0.8
        }
    data = json.dumps(event).encode()
    return spoiled(lots, data) if lots.random() < 0.5 else data


def socket_messages(lots: random.Random) -> None:
    """Datagrams between the client and the warden, some with descriptors beside them."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        if lots.random() < 0.3:
            send(theirs, {"op": "x"}, [theirs.fileno()])
        else:
            theirs.send(_message(lots) or b"\0")
        found = _refused_or_read(lambda: receive(ours, socket.MSG_DONTWAIT), ValueError, RecursionError)
        for fd in found[1] if found else ():
            os.close(fd)


class _StandIn:
    """A warden that says what it is told to."""

    pid = 1

    def __init__(self, said: list[bytes]) -> None:
        self._said = said

    def has_ended(self) -> bool:
        return False

    def messages(self) -> Iterator[Any]:
        while self._said:
            yield json.loads(self._said.pop(0))


def warden_messages(lots: random.Random) -> None:
    """The pool goes on, or has ended and says why."""
    pool = Pool(Config(max_executors=4, arena_bytes=1 << 16, ring_bytes=1 << 12, slots=16))
    try:
        stand_in: Any = _StandIn([_message(lots) for _ in range(3)])
        pool._warden = stand_in
        if pool.check():
            return
        error = pool.error()
        if error is None or not str(error):
            raise Violation("the pool has ended and does not say why")
    finally:
        pool._warden = None
        pool.shutdown()
