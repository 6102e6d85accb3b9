"""The command ring, the reply ring, and the shared memory under both. Readers here are threads or plain calls."""

from __future__ import annotations

import os
import random
import select
import threading
import time
from collections.abc import Iterator

import pytest

from dtorch.errors import ExecutorDiedError, PoolError, RunAheadError
from dtorch.runtime import ring
from dtorch.runtime.config import Config
from dtorch.runtime.reply import ReplyReader, ReplyWriter, reply_memfd
from dtorch.runtime.ring import CONTROL, FIRST_PLAN, FREE, WRAP, Notifier, Reader, Writer
from dtorch.runtime.scheduler import DOZE_WAKE_WORDS, Pressure
from dtorch.runtime.shared import (
    ASLEEP,
    DEAD,
    DEAD_POOL,
    DOZING,
    EXECUTOR_DONE,
    EXECUTOR_READ,
    EXECUTOR_STATE,
    RUNNING,
    WAITING,
    WRITE,
    SharedState,
    executor_line,
)

RING_WORDS = 512


def small(**options: int) -> Config:
    return Config(**{"ring_bytes": 8 * RING_WORDS, "arena_bytes": 4096, "slots": 16, "max_executors": 4, **options})


@pytest.fixture
def state() -> Iterator[SharedState]:
    s = SharedState.create(small())
    yield s
    s.close()


def reader_of(writer: Writer, executor: int = 0) -> Reader:
    writer.add_reader(executor)
    return Reader(writer.state, executor, writer.state.add_wake(executor))


def drain(reader: Reader) -> list[tuple[int, tuple[int, ...]]]:
    """Everything unread as (plan id, words), given back."""
    found = reader.poll()
    if found is None:
        return []
    at, end = found
    records: list[tuple[int, tuple[int, ...]]] = []
    while at < end:
        p = at & reader.mask
        plan, n = reader.ring[p] & 0xFFFFFFFF, reader.ring[p] >> 32
        assert p + n <= RING_WORDS, "a record straddles the end"
        if plan != WRAP:
            records.append((plan, tuple(reader.ring[p + 1 : p + n])))
        at += n
    assert at == end
    reader.advance(end, len(records))
    return records


def test_records_arrive_whole_and_in_order_over_many_laps(state: SharedState) -> None:
    rng = random.Random(1)
    writer = Writer(state, small())
    readers = [reader_of(writer, 0), reader_of(writer, 2)]
    sent: list[tuple[int, tuple[int, ...]]] = []
    got: list[list[tuple[int, tuple[int, ...]]]] = [[], []]
    unread = [0, 0]
    for _ in range(3000):
        words = tuple(rng.randrange(1 << 64) for _ in range(rng.randrange(1, 60)))
        with writer.lock:
            writer.write_record(FIRST_PLAN + len(words), words)
        sent.append((FIRST_PLAN + len(words), words))
        for i, reader in enumerate(readers):
            unread[i] += len(words) + 1
            if unread[i] > 100 or rng.random() < 0.3:
                got[i] += drain(reader)
                unread[i] = 0
    for i, reader in enumerate(readers):
        assert got[i] + drain(reader) == sent
    assert writer.head > 100 * RING_WORDS
    assert writer.issued == 3000 and writer.behind() == 0


def test_inline_writing_as_the_hot_path_does_it(state: SharedState) -> None:
    writer = Writer(state, small())
    reader = reader_of(writer)
    words, control, mask = state.ring_words, state.control, writer.mask
    for i in range(2000):
        with writer.lock:
            head = writer.head
            end = head + 3
            if end > writer.limit:
                head = writer.make_room(3)
                end = head + 3
            p = head & mask
            words[p] = FIRST_PLAN | 3 << 32
            words[p + 1] = i
            state.ring_doubles[p + 2] = -i / 4
            writer.head = control[WRITE] = end
            writer.issued += 1
        if i % 7 == 0:
            assert [w[0] for _, w in drain(reader)] == list(range(max(0, i - 6), i + 1))
    assert state.ring_doubles[p + 2] == -1999 / 4
    state.ring_ints[p + 1] = -1
    assert words[p + 1] == (1 << 64) - 1


def test_bytes_records(state: SharedState) -> None:
    writer = Writer(state, small())
    reader = reader_of(writer)
    for payload in (b"", b"x", b"12345678", b"123456789", bytes(range(256)) * 4):
        writer.send_control(payload)
        with writer.lock:
            writer.write_bytes_record(FIRST_PLAN, (7, 8), payload)
            writer.write_record(FREE, (1, 2, 3))
        (plan, words), (plan2, words2), free = drain(reader)
        assert (plan, plan2, words2[:2]) == (CONTROL, FIRST_PLAN, (7, 8))
        for w in (words, words2[2:]):
            assert w[0] == len(payload)
            assert b"".join(x.to_bytes(8, "little") for x in w[1:])[: w[0]] == payload
        assert free == (FREE, (1, 2, 3))


def test_a_record_too_large_names_an_option_that_fits(state: SharedState) -> None:
    writer = Writer(state, small())
    reader_of(writer)
    with writer.lock, pytest.raises(ValueError, match=r"configure\(ring_bytes=(\d+)\)") as caught:
        writer.write_bytes_record(CONTROL, (), b"x" * 5000)
    advised = int(str(caught.value).rpartition("=")[2].rstrip(")"))
    other = SharedState.create(small(ring_bytes=advised))
    writer = Writer(other, small())
    writer.send_control(b"x" * 5000)
    other.close()


def test_a_late_reader_sees_only_what_comes_after(state: SharedState) -> None:
    writer = Writer(state, small())
    first = reader_of(writer, 0)
    with writer.lock:
        writer.write_record(FIRST_PLAN, (1,))
    late = reader_of(writer, 1)
    with writer.lock:
        writer.write_record(FIRST_PLAN, (2,))
    assert writer.behind() == 2
    assert [w for _, w in drain(late)] == [(2,)]
    assert [w for _, w in drain(first)] == [(1,), (2,)]
    assert state.control[executor_line(1) + EXECUTOR_DONE] == state.control[executor_line(0) + EXECUTOR_DONE] == 2


def test_unread_records_are_never_overwritten(state: SharedState) -> None:
    writer = Writer(state, small(), in_loop=lambda: True)
    reader = reader_of(writer)
    written = 0
    with pytest.raises(RunAheadError, match=r"the command ring is full.*await t\.ready\(\)"):
        for i in range(1000):
            with writer.lock:
                writer.write_record(FIRST_PLAN, (i, i, i, i, i, i))
            written += 1
    assert written == RING_WORDS // 7
    assert [w[0] for _, w in drain(reader)] == list(range(written))
    with writer.lock:
        writer.write_record(FIRST_PLAN, (5,))
    assert drain(reader) == [(FIRST_PLAN, (5,))]


def test_run_ahead_bounds_are_exact(state: SharedState) -> None:
    writer = Writer(state, small(run_ahead_soft=4, run_ahead_hard=10), in_loop=lambda: True)
    reader = reader_of(writer)

    def write() -> None:
        with writer.lock:
            writer.write_record(FIRST_PLAN, (1, 2, 3))

    asked: list[Pressure] = []
    for _ in range(10):
        asked.append(writer.pressure())
        write()
    assert asked == [Pressure.NONE] * 4 + [Pressure.SOFT] * 6
    assert writer.pressure() is Pressure.HARD
    with pytest.raises(RunAheadError, match="10 commands were issued"):
        write()
    drain(reader)
    for _ in range(10):
        write()
    with pytest.raises(RunAheadError):
        write()


def test_outside_a_loop_a_full_ring_waits(state: SharedState) -> None:
    waits: list[int] = []
    writer = Writer(state, small(run_ahead_hard=10, run_ahead_soft=1), while_waiting=lambda: waits.append(1))
    reader = reader_of(writer)
    for i in range(10):
        with writer.lock:
            writer.write_record(FIRST_PLAN, (i,))
    thread = threading.Timer(0.05, drain, (reader,))
    thread.start()
    start = time.monotonic()
    with writer.lock:
        writer.write_record(FIRST_PLAN, (10,))
    assert time.monotonic() - start >= 0.04
    thread.join()
    assert drain(reader) == [(FIRST_PLAN, (10,))]
    assert waits


@pytest.mark.parametrize(("word", "error"), [(1, ExecutorDiedError), (DEAD_POOL, PoolError)])
def test_a_death_ends_the_wait_for_room(state: SharedState, word: int, error: type[Exception]) -> None:
    writer = Writer(state, small(run_ahead_hard=1, run_ahead_soft=1))
    reader_of(writer)
    with writer.lock:
        writer.write_record(FIRST_PLAN, (0,))
    state.control[DEAD] = word
    with writer.lock, pytest.raises(error, match=r"dtorch\.restart\(\)"):
        writer.write_record(FIRST_PLAN, (1,))


def test_readers_that_are_gone_are_not_waited_for(state: SharedState) -> None:
    writer = Writer(state, small(), in_loop=lambda: True)
    reader_of(writer)
    writer.remove_reader(0)
    for i in range(2000):
        with writer.lock:
            writer.write_record(FIRST_PLAN, (i,))
    assert writer.behind() == 0


@pytest.mark.parametrize(
    ("state_word", "unread", "sync", "woken"),
    [
        (RUNNING, 400, True, False),
        (DOZING, 4, False, False),
        (DOZING, 4, True, True),
        (DOZING, DOZE_WAKE_WORDS, False, True),
        (ASLEEP, 2, False, True),
        (ASLEEP, 0, True, False),
    ],
)
def test_wake(state: SharedState, state_word: int, unread: int, sync: bool, woken: bool) -> None:
    writer = Writer(state, small())
    reader_of(writer)
    line = executor_line(0)
    for _ in range(unread // 2):
        with writer.lock:
            writer.write_record(FIRST_PLAN, (0,))
    state.control[line + EXECUTOR_STATE] = state_word
    writer.wake((0,), sync=sync)
    readable = bool(select.select([state.wake_fds[0]], [], [], 0)[0])
    assert readable == woken
    assert state.control[line + EXECUTOR_STATE] == (RUNNING if woken else state_word)


def test_a_waiting_reader_dozes_then_sleeps_until_woken(state: SharedState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "_RECHECK_MS", 1_000_000)
    writer = Writer(state, small())
    reader = reader_of(writer)
    idle: list[int] = []
    reader.idle = lambda: idle.append(1)
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.append(reader.wait(10)))
    thread.start()
    word = executor_line(0) + EXECUTOR_STATE
    deadline = time.monotonic() + 5
    while state.control[word] != ASLEEP and time.monotonic() < deadline:
        time.sleep(0.001)
    assert state.control[word] == ASLEEP
    with writer.lock:
        writer.write_record(FIRST_PLAN, (1,))
    writer.wake((0,))
    thread.join(10)
    assert seen == [(0, 2)] and idle == [1]
    assert state.control[word] == RUNNING


def test_a_reader_notices_without_being_woken(state: SharedState) -> None:
    """A wake-up that was lost costs a fifth of a second, not a hang."""
    writer = Writer(state, small())
    reader = reader_of(writer)
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.append(reader.wait()))
    thread.start()
    time.sleep(0.05)
    with writer.lock:
        writer.write_record(FIRST_PLAN, (1,))
    thread.join(2)
    assert seen == [(0, 2)]


def test_reader_timeout(state: SharedState) -> None:
    reader = reader_of(Writer(state, small()))
    assert reader.wait(0.02) is None
    assert state.control[executor_line(0) + EXECUTOR_STATE] == RUNNING


def test_a_reader_in_another_thread_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reader and writer race on a small ring, with naps on both sides and never a wake-up too few."""
    monkeypatch.setattr(ring, "_RECHECK_MS", 1_000_000)
    state = SharedState.create(small())
    writer = Writer(state, small())
    reader = reader_of(writer)
    n = 20_000
    got: list[int] = []

    def read() -> None:
        rng = random.Random(3)
        while len(got) < n and reader.wait(20) is not None:
            got.extend(w[0] for _, w in drain(reader))
            if rng.random() < 0.01:
                time.sleep(0.0002)

    thread = threading.Thread(target=read)
    thread.start()
    rng = random.Random(4)
    for i in range(n):
        with writer.lock:
            writer.write_record(FIRST_PLAN, (i,) * rng.randrange(1, 9))
        writer.wake((0,))
        if rng.random() < 0.001:
            time.sleep(0.005)
    thread.join(40)
    assert got == list(range(n))
    state.close()


def test_notifier_writes_only_if_someone_waits_and_not_for_each(state: SharedState) -> None:
    notifier = Notifier(state)
    at = state.slot_word(3, 1)
    notifier.complete(at, 5)
    notifier.flush()
    assert state.control[at] == 5

    def writes() -> int:
        try:
            return os.eventfd_read(state.done_fd)
        except BlockingIOError:
            return 0

    assert writes() == 0
    state.control[WAITING] = 1
    notifier.flush()
    assert writes() == 0, "nothing new was completed"
    for _ in range(15):
        notifier.complete(at, 9)
    assert writes() == 0
    notifier.complete(at, 9)
    assert writes() == 1
    notifier.complete(at, 9)
    notifier.flush()
    assert writes() == 1


# Replies


@pytest.fixture
def reply() -> Iterator[int]:
    fd = reply_memfd(1 << 12)
    yield fd
    os.close(fd)


def test_replies_of_all_lengths(reply: int) -> None:
    writer, reader = ReplyWriter(reply), ReplyReader(reply)
    rng = random.Random(2)
    for _ in range(500):
        sent = [rng.randbytes(rng.choice((0, 1, 7, 8, 9, 200))) for _ in range(rng.randrange(1, 10))]
        for message in sent:
            writer.send(message)
        assert reader.drain() == sent
    assert reader.drain() == []
    writer.close()
    reader.close()


def test_replies_longer_than_their_ring_wait_for_the_client(reply: int) -> None:
    full: list[int] = []
    writer, reader = ReplyWriter(reply, full=lambda: full.append(1)), ReplyReader(reply)
    rng = random.Random(3)
    sent = [rng.randbytes(n) for n in (100_000, 3, 4096, 4095, 0, 20_000)]
    thread = threading.Thread(target=lambda: [writer.send(m) for m in sent])
    thread.start()
    got: list[bytes] = []
    deadline = time.monotonic() + 20
    while len(got) < len(sent) and time.monotonic() < deadline:
        got += reader.drain()
    thread.join(5)
    assert got == sent
    assert full
    writer.close()
    reader.close()


# Shared memory


def test_attached_memory_is_the_same_memory(state: SharedState) -> None:
    other = SharedState.attach(state.fds())
    state.control[executor_line(3) + EXECUTOR_READ] = 77
    state.ring_words[5] = 1 << 63
    state.arena_map[10:12] = b"ab"
    state.collective_map[100] = 9
    assert other.control[executor_line(3) + EXECUTOR_READ] == 77
    assert (other.ring_words[5], other.ring_ints[5]) == (1 << 63, -(1 << 63))
    assert other.ring_bytes[47] == 0x80
    assert other.arena_map[10:12] == b"ab"
    assert other.collective_map[100] == 9
    assert (other.max_executors, other.slots) == (4, 16)
    assert other.slot_word(15, 3) == len(other.control) - 1


def test_closing_leaves_nothing_and_tells_waiters() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        state = SharedState.create(small())
        state.add_wake(0)
        state.add_wake(0)
        control = state.control
        state.close()
        state.close()
        assert control[DEAD] == DEAD_POOL
        del state, control
    assert len(os.listdir("/proc/self/fd")) == before


def test_descriptors_are_not_inherited_by_programs(state: SharedState) -> None:
    state.add_wake(0)
    for fd in (*state.fds().values(), *state.wake_fds.values()):
        assert not os.get_inheritable(fd)


def test_another_layout_is_refused(state: SharedState) -> None:
    state.control[40] = 99
    with pytest.raises(PoolError, match="different versions"):
        SharedState.attach(state.fds())
