"""An executor's main loop: read → run → report.

The loop reads whatever the client has published, runs it record by record, and tells the client's waiters once per
drained batch (or every 16 completions). It sleeps only when there is nothing to do (`ring.Reader.wait`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from time import monotonic_ns
from typing import Any, NoReturn

import torch

from ..runtime import config
from ..runtime.command import CONTROL, FREE, LENGTH_SHIFT, PLAN_MASK, WRAP
from ..runtime.reply import ReplyWriter
from ..runtime.ring import Notifier, Reader
from ..runtime.shared import (
    ABORT,
    DEAD,
    DEAD_POOL,
    EXECUTOR_DONE,
    EXECUTOR_PLAN,
    EXECUTOR_READ,
    EXECUTOR_READY,
    EXECUTOR_STARTED,
    SharedState,
    executor_line,
)
from .collectives import Comm
from .device import DeviceError, open_device
from .interpreter import Interpreter
from .shm_collectives import Aborted
from .streams import tell_ranks
from .transfers import TransferReader

__all__ = ["run"]

# Every record has a length, and the last ends where the client says that it has written to.
_UNREADABLE = "the command ring holds what is no record: something has written over the memory that the pool shares"


def run(index: int, state: SharedState, wake_fd: int, reply: ReplyWriter, options: dict[str, Any]) -> None:
    """Serve the pool as executor `index` until the process is ended.

    Args:
        index: this executor's number.
        state: the pool's shared memory.
        wake_fd: the eventfd that the client writes when this executor sleeps.
        reply: where answers that are more than "done" go.
        options: "collectives" ("shm" or "gloo"), "threads", "device", and for a device that is no CPU "accelerators"
            (index of the first executor of one), "pinned" (bytes of the arena that it may pin).
    """
    config.inside_executor = True
    torch.set_num_threads(options.get("threads", 1))
    # Gradients are the client's business; inference mode spares version counters as well.
    with torch.inference_mode():
        tell = Notifier(state).ring
        device = open_device(options.get("device", "cpu"), state, options)
        transfers = device.transfers(state, index, tell)
        comm = Comm(
            state,
            index,
            options.get("collectives", "shm"),
            accelerators=options.get("accelerators", state.max_executors),
            nccl=device.nccl,
        )
        interpreter = Interpreter(index, state, reply.send, comm, device, transfers)
        tell_ranks(interpreter.ranks_now)
        if transfers is None:
            reader = Reader(state, index, wake_fd)
        else:
            reader, tell = TransferReader(state, index, wake_fd, transfers), transfers.tell
        state.control[executor_line(index) + EXECUTOR_READY] = 1
        os.eventfd_write(state.done_fd, 1)
        try:
            _serve(interpreter, reader, state, index, tell)
        except Exception as error:
            # Raised between commands: by a transfer, say.
            if isinstance(error, DeviceError) or not device.is_lost_by(error):
                raise
            raise DeviceError.after(error, device.name, "") from error


def _serve(
    interpreter: Interpreter, reader: Reader, state: SharedState, index: int, tell: Callable[[], object]
) -> None:
    control, words = state.control, state.ring_words
    mask = len(words) - 1
    line = executor_line(index)
    read_word, count_word = line + EXECUTOR_READ, line + EXECUTOR_DONE
    plan_word, started_word = line + EXECUTOR_PLAN, line + EXECUTOR_STARTED
    plans = interpreter.plans
    while True:
        span = reader.poll()
        if span is None:
            control[plan_word] = 0
            span = reader.wait()
            if span is None:
                continue
        pos, end = span
        told = pos
        count = control[count_word]
        since = 0
        control[started_word] = monotonic_ns()
        while pos < end:
            p, head, plan = 0, 0, 0
            try:
                while pos < end:
                    p = pos & mask
                    head = words[p]
                    control[plan_word] = plan = head & PLAN_MASK
                    run = plans.get(plan)
                    if run is not None:
                        run(p)
                    elif plan == FREE:
                        interpreter.free(p + 1, p + (head >> LENGTH_SHIFT))
                    elif plan == CONTROL:
                        interpreter.sequence = pos
                        start = 8 * (p + 2)
                        interpreter.control(state.ring_bytes[start : start + words[p + 1]])
                    elif plan == WRAP:
                        count -= 1
                    # else: a plan of a mesh that this executor has no part in
                    pos += head >> LENGTH_SHIFT
                    since += 1
                    if since >= 16:
                        if pos < told + 16:
                            raise DeviceError(_UNREADABLE)
                        count += since
                        since = 0
                        told = pos
                        control[read_word] = pos
                        control[count_word] = count
                        control[started_word] = monotonic_ns()
                        tell()
            except BaseException as error:
                # A user's function may raise anything, KeyboardInterrupt and SystemExit too: it is the command that
                # has failed. Only the end of the pool is the end of this process.
                if control[DEAD] & DEAD_POOL and not isinstance(error, Exception):
                    raise
                if isinstance(error, Aborted) and control[ABORT]:
                    _await_end(control)
                # What is being run is the command at the read index, for whoever asks.
                control[read_word] = pos
                control[count_word] = count + since
                device = interpreter.device
                if isinstance(error, DeviceError):
                    raise
                if device.is_lost_by(error):
                    # It computes no more: this process ends, and the warden reports it.
                    text = getattr(interpreter.messages.get(plan), "text", "")
                    raise DeviceError.after(error, device.name, text) from error
                interpreter.failed(plan, p, error)
                if not head >> LENGTH_SHIFT:
                    raise DeviceError(_UNREADABLE) from error
                pos += head >> LENGTH_SHIFT
                since += 1
        if pos != end:
            raise DeviceError(_UNREADABLE)
        control[read_word] = pos
        control[count_word] = count + since
        reader.position = pos
        tell()


def _await_end(control: memoryview) -> NoReturn:
    """A peer has died, and with it the pool: run nothing more, so that what was not answered stays unanswered."""
    while not control[DEAD] & DEAD_POOL:
        time.sleep(0.05)
    raise SystemExit(0)
