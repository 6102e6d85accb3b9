"""Executors that hang: who, in what, since when, who waits, and where they are; and waits that run out of time."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import pytest
import torch

import dtorch
from dtorch import Replicate, Shard, init_device_mesh
from dtorch.errors import PoolError
from dtorch.executor.names import Names, PlanName
from dtorch.executor.pool import Pool
from dtorch.executor.stacks import Stacks
from dtorch.executor.watchdog import Watchdog, text_of
from dtorch.runtime.client import client
from dtorch.runtime.command import CONTROL, FIRST_PLAN, MakeLocals, encode
from dtorch.runtime.config import Config
from dtorch.runtime.hung import waiters
from dtorch.runtime.ring import Writer
from dtorch.runtime.shared import (
    EXECUTOR_CONTROL,
    EXECUTOR_PLAN,
    EXECUTOR_READ,
    EXECUTOR_READY,
    SharedState,
    executor_line,
)

from .scripts import run_body
from .test_pool import importing

# A function that is stuck on rank 1 until `release()`, and says when it has come there.
HANGS = """
import asyncio, logging, os, signal, sys, threading, time
import torch, dtorch
from dtorch import Replicate, Shard
from dtorch.runtime.client import client

path = f"/proc/{os.getpid()}/fd/"
starts, gates = [os.pipe() for _ in range(4)], [os.pipe() for _ in range(4)]

def hangs(rank, hung=(1,)):
    if rank in hung:
        with open(f"{path}{starts[rank][1]}", "w") as started:
            started.write("!")
        with open(f"{path}{gates[rank][0]}") as gate:
            gate.read(1)
    return torch.ones(2)

def at_it(rank=1):
    assert os.read(starts[rank][0], 1) == b"!"

def release(rank=1):
    os.write(gates[rank][1], b"!")
"""
STACK = r"Where it is, most recent call first:\n(?:Current t|T)hread 0x\w+ \(most recent call first\):\n"


# -- on real executors ----------------------------------------------------------------------------------------------


def test_a_peer_in_a_collective_is_not_to_blame() -> None:
    """A user's function hangs on rank 1; rank 0 waits for it in a collective; tasks and a thread wait for both."""
    done = run_body(
        HANGS
        + """
mesh = dtorch.init_device_mesh("cpu", (2,))
x = dtorch.from_local(hangs, mesh, [Shard(0)], shape=(4,))
y = x.redistribute(placements=[Replicate()])
at_it()

class Seen(logging.Handler):
    def emit(self, record):
        # At first they may not all have come to it.
        text = record.getMessage()
        if "waits for its peers" in text and "(3 times)" in text and "in <lambda>" in text:
            release()
logging.getLogger("dtorch").addHandler(Seen())
logging.getLogger("dtorch").addHandler(logging.StreamHandler())

async def one():
    return (await y)[0].item()

async def main():
    return await asyncio.gather(*[one() for _ in range(3)])

sums = []
thread = threading.Thread(target=lambda: sums.append(x.sum().item()))
thread.start()
print(asyncio.run(main()))
thread.join()
print(sums)
""",
        DTORCH_WATCHDOG="1.0",
    )
    assert done.stdout == "[1.0, 1.0, 1.0]\n[4.0]\n"
    wanted = (
        r"dtorch: executor 1 \(pid \d+\) has been in from_local\(float32\[4\] \[Shard\(0\)\]\) on rank 1 \(cpu:1\) "
        r"for \d+ s, issued at <string>:\d+ in <module>\. "
        r"Meanwhile executor 0 waits for its peers in "
        r"redistribute\(float32\[4\] \[Shard\(0\)\] -> \[Replicate\(\)\]\); "
        r"values are waited for at <string>:\d+ in one \(3 times\), <string>:\d+ in <lambda>\. "
    )
    assert re.search(wanted + STACK, done.stderr), done.stderr
    assert " in hangs\n" in done.stderr and "become_executor" not in done.stderr
    told = re.findall(r"dtorch: .*", done.stderr)
    assert len(told) == len(set(told)), done.stderr


def test_several_at_once_each_in_its_own() -> None:
    done = run_body(
        HANGS
        + """
a, b = dtorch.DeviceMesh("cpu", [0]), dtorch.DeviceMesh("cpu", [1])
first = dtorch.from_local(lambda r: hangs(0, (0,)), a, [Replicate()], shape=(2,))
second = dtorch.from_local(lambda r: hangs(1, (1,)), b, [Replicate()], shape=(2,), )
at_it(0); at_it(1)

class Seen(logging.Handler):
    told = set()
    def emit(self, record):
        print(record.levelname, record.name, file=sys.stderr)
        self.told |= {e for e in (0, 1) if f"executor {e} (pid" in record.getMessage()}
        if self.told == {0, 1}:
            release(0); release(1)
logging.getLogger("dtorch").addHandler(Seen())
logging.getLogger("dtorch").addHandler(logging.StreamHandler())
print(first.sum().item(), second.sum().item())
""",
        DTORCH_WATCHDOG="1.0",
        DTORCH_CPU_EXECUTORS="2",
    )
    assert done.stdout == "2.0 2.0\n"
    for e in (0, 1):
        assert re.search(rf"executor {e} \(pid \d+\) has been in from_local\(.*?\) on rank 0 \(cpu:{e}\)", done.stderr)
    assert "WARNING dtorch\n" in done.stderr
    assert "waits for its peers" not in done.stderr


def test_a_client_that_is_busy_is_told_on_stderr() -> None:
    """The warden speaks where nobody looks; and nothing is said twice when the client looks again."""
    done = run_body(
        HANGS
        + """
stderr = os.memfd_create("stderr")
shown = os.dup(2)
os.dup2(stderr, 2)
mesh = dtorch.init_device_mesh("cpu", (2,))
x = dtorch.from_local(hangs, mesh, [Shard(0)], shape=(4,))
at_it()
class Seen(logging.Handler):
    def emit(self, record):
        print("logged", flush=True)
logging.getLogger("dtorch").addHandler(Seen())
# One long call in C that does not let go of the interpreter would be the same: nobody waits for dtorch.
deadline = time.monotonic() + 60
while b"in hangs" not in os.pread(stderr, 1 << 20, 0) and time.monotonic() < deadline:
    time.sleep(0.01)
release()
print(x.sum().item())
os.write(shown, os.pread(stderr, 1 << 20, 0))
""",
        DTORCH_WATCHDOG="2.5",
    )
    assert done.stdout == "4.0\n"
    assert len(re.findall(r"dtorch: executor 1 \(pid \d+\) has been in from_local", done.stderr)) == 1, done.stderr
    assert " in hangs\n" in done.stderr


def test_a_stopped_executor_is_named_without_a_stack() -> None:
    done = run_body(
        HANGS
        + """
mesh = dtorch.init_device_mesh("cpu", (2,))
x = dtorch.ones(4, device_mesh=mesh)
print((x + 1).to_local(1).sum().item())
pid = client().pool.pids[1]
os.kill(pid, signal.SIGSTOP)
class Seen(logging.Handler):
    def emit(self, record):
        os.kill(pid, signal.SIGCONT)
logging.getLogger("dtorch").addHandler(Seen())
logging.getLogger("dtorch").addHandler(logging.StreamHandler())
print((x + 1).to_local(1).sum().item())
""",
        DTORCH_WATCHDOG="0.8",
    )
    assert done.stdout == "8.0\n8.0\n"
    assert re.search(r"executor 1 \(pid \d+\) has been in .* on rank 1 \(cpu:1\) for", done.stderr), done.stderr
    assert "no answer within 0.5 s: it is stopped, or does not run" in done.stderr


def test_an_operator_of_the_users_on_several_ranks_of_one_executor() -> None:
    done = run_body(
        HANGS
        + """
@torch.library.custom_op("mine::wait", mutates_args=())
def wait(x: torch.Tensor) -> torch.Tensor:
    hangs(1)
    return x.clone()

@wait.register_fake
def _(x):
    return torch.empty_like(x)

mesh = dtorch.init_device_mesh("cpu", (2, 2))
x = dtorch.ones(2, device_mesh=mesh)
y = wait(x)
at_it()
class Seen(logging.Handler):
    def emit(self, record):
        for _ in range(4): release()
logging.getLogger("dtorch").addHandler(Seen())
logging.getLogger("dtorch").addHandler(logging.StreamHandler())
print(y.sum().item())
""",
        DTORCH_WATCHDOG="0.8",
        DTORCH_CPU_EXECUTORS="2",
    )
    assert done.stdout == "2.0\n"
    assert re.search(
        r"has been in mine::wait\(x float32\[2\] \[Replicate\(\), Replicate\(\)\]\) on ranks 0, 2 \(cpu:0, cpu:2\) for",
        done.stderr,
    ), done.stderr


def test_a_start_that_hangs() -> None:
    """The stand-in never says that it is ready."""
    pool = Pool(
        Config(max_executors=4, arena_bytes=1 << 20, ring_bytes=1 << 20, slots=64, watchdog=0.5),
        entry="tests.process.pool_entries:late",
    )
    said: list[str] = []
    pool.text_of = lambda message: said.append(text_of(message)) or said[-1]
    ended: list[BaseException] = []

    def start() -> None:
        try:
            pool.ensure(1)
        except PoolError as error:
            ended.append(error)

    thread = threading.Thread(target=start)
    with importing(torch=False):
        thread.start()
        deadline = time.monotonic() + 60
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
        pool.shutdown()
        thread.join(20)
    assert len(ended) == 1
    assert re.match(r"dtorch: executor 0 \(pid \d+\) has been in its start for \d+ s\.", said[0]), said
    assert " in late" in said[0]


def test_a_watchdog_may_be_off() -> None:
    done = run_body(
        HANGS
        + """
mesh = dtorch.init_device_mesh("cpu", (2,))
x = dtorch.from_local(hangs, mesh, [Shard(0)], shape=(4,))
at_it()
time.sleep(1.2)
release()
print(x.sum().item())
""",
        DTORCH_WATCHDOG="0",
    )
    assert (done.stdout, done.stderr) == ("4.0\n", "")


# -- waits that run out of time -------------------------------------------------------------------------------------


@pytest.fixture
def held() -> Iterator[tuple[dtorch.Tensor, Callable[[], object]]]:
    """float32[4] on two ranks, which rank 1 makes only when the second is called; rank 1 is at it, rank 0 is not."""
    read, write = os.pipe()
    at_it, says = os.pipe()
    path, there = (f"/proc/{os.getpid()}/fd/{fd}" for fd in (read, says))

    def local(rank: int) -> torch.Tensor:
        if rank == 1:
            with open(there, "w") as started:
                started.write("!")
            with open(path) as gate:
                gate.read(1)
        return torch.ones(2)

    mesh = init_device_mesh("cpu", (2,))
    made = dtorch.from_local(local, mesh, [Shard(0)], shape=(4,))
    assert os.read(at_it, 1) == b"!"
    assert made.to_local(0).tolist() == [1, 1]
    yield made, lambda: os.write(write, b"!")
    os.close(at_it)
    os.close(says)
    os.close(write)
    made.redistribute(placements=[Replicate()]).to_torch()
    os.close(read)


def test_a_timeout_names_what_it_waited_for_and_harms_nothing(
    held: tuple[dtorch.Tensor, Callable[[], object]],
) -> None:
    made, release = held
    future = made.to_torch_async()
    line = test_a_timeout_names_what_it_waited_for_and_harms_nothing.__code__.co_firstlineno + 4
    for ask in (future.get, future.result, future.exception):
        with pytest.raises(TimeoutError) as caught:
            ask(timeout=0.05)
        text = str(caught.value)
        assert not isinstance(caught.value, dtorch.RemoteError)
        assert text.startswith("the value was not there after 0.05 s; it is still on its way, ask again. Waited for: ")
        assert f"float32[4], asked for at {os.path.relpath(__file__)}:{line} in test_a_timeout" in text
        assert "executor 1 has not answered, it is at from_local(float32[4] [Shard(0)])" in text
        assert "executor 0" not in text
    assert not future.wait(0.01) and not future.wait_for(10) and not future.is_ready()
    # Others are not touched by it, and those behind it are still to come.
    other = dtorch.ones(3)
    assert other.sum().item() == 3
    behind = (made * 2).to_torch_async()
    with pytest.raises(TimeoutError):
        behind.get(timeout=0.05)
    release()
    assert future.get(timeout=30).tolist() == [1, 1, 1, 1]
    assert behind.get(timeout=30).tolist() == [2, 2, 2, 2]


def test_a_timeout_of_many_names_the_first(held: tuple[dtorch.Tensor, Callable[[], object]]) -> None:
    made, release = held
    sync = dtorch.default_graph().sync_future()
    with pytest.raises(TimeoutError, match=r"Waited for: 1 of \d+ values, the first: float32\[\]"):
        sync.get(timeout=0.3)
    release()
    sync.get(timeout=30)
    assert made.to_torch().tolist() == [1, 1, 1, 1]


def test_cancelled_waits_leave_all_usable(held: tuple[dtorch.Tensor, Callable[[], object]]) -> None:
    made, release = held

    async def main() -> list[float]:
        future = made.to_torch_async()
        for _ in range(3):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.ensure_future(_value(future)), 0.05)
        release()
        return (await future).tolist()

    assert asyncio.run(main()) == [1, 1, 1, 1]


async def _value(future: dtorch.TensorFuture[torch.Tensor]) -> torch.Tensor:
    return await future


# -- the decisions, without processes -------------------------------------------------------------------------------


class Scene:
    """Shared memory of two executors that only this test writes."""

    def __init__(self) -> None:
        config = Config(max_executors=4, ring_bytes=1 << 14, arena_bytes=1 << 20, slots=64)
        self.state = SharedState.create(config)
        self.writer = Writer(self.state, config)
        self.pids = {0: 100, 1: 101}
        for e in self.pids:
            self.writer.add_reader(e)
            self.state.control[executor_line(e) + EXECUTOR_READY] = 1
        self.fd = os.memfd_create("names")
        self.names = Names(self.fd)
        self.names.add_mesh(1, "cpu", (0, 1, 2, 3), (0, 1, 0, 1))
        self.watchdog = Watchdog(self.state, self.fd, 4.0)

    def issue(self, plan: int) -> int:
        with self.writer.lock:
            at = self.writer.head
            self.writer.write_record(plan, (1, 2))
        return at

    def stand(self, executor: int, read: int, plan: int) -> None:
        line = executor_line(executor)
        self.state.control[line + EXECUTOR_READ] = read
        self.state.control[line + EXECUTOR_PLAN] = plan

    def close(self) -> None:
        self.watchdog.close()
        self.state.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.close()


A, B, MOVE = FIRST_PLAN, FIRST_PLAN + 1, FIRST_PLAN + 2


def test_the_same_index_does_not_mean_the_same_guilt(scene: Scene) -> None:
    """Both stand at one published index: executor 1 is in an operator, executor 0 in the exchange after it."""
    scene.names.add_plan(A, PlanName("a(x)", 1))
    scene.names.add_plan(MOVE, PlanName("redistribute(x)", 1, True))
    at = scene.issue(A)
    scene.issue(MOVE)
    scene.stand(0, at, MOVE)
    scene.stand(1, at, A)
    assert scene.watchdog.look(scene.pids, 10.0) is None
    assert scene.watchdog.look(scene.pids, 13.0) is None
    found = scene.watchdog.look(scene.pids, 15.0)
    assert found is not None
    assert text_of(found) == (
        "dtorch: executor 1 (pid 101) has been in a(x) on ranks 1, 3 (cpu:1, cpu:3) for 5 s. "
        "Meanwhile executor 0 waits for its peers in redistribute(x)."
    )
    assert found["stuck"][0]["positions"] == (at,)
    # Told again when its age has doubled, and not before.
    assert scene.watchdog.look(scene.pids, 19.0) is None
    assert scene.watchdog.look(scene.pids, 20.5) is not None


def test_all_in_one_exchange_are_told_of(scene: Scene) -> None:
    scene.names.add_plan(MOVE, PlanName("redistribute(x)", 1, True))
    at = scene.issue(MOVE)
    for e in (0, 1):
        scene.stand(e, at, MOVE)
    scene.watchdog.look(scene.pids, 0.0)
    found = scene.watchdog.look(scene.pids, 5.0)
    assert found is not None and [s["executor"] for s in found["stuck"]] == [0, 1]


def test_progress_below_the_published_index_counts(scene: Scene) -> None:
    """The index is published every 16 commands; the plan at once."""
    at = scene.issue(A)
    scene.issue(B)
    scene.stand(1, at, A)
    scene.state.control[executor_line(0) + EXECUTOR_READ] = scene.writer.head
    scene.watchdog.look(scene.pids, 0.0)
    scene.stand(1, at, B)
    assert scene.watchdog.look(scene.pids, 3.9) is None
    assert scene.watchdog.look(scene.pids, 7.0) is None
    found = scene.watchdog.look(scene.pids, 8.0)
    assert found is not None
    assert text_of(found, {1: "x.py:3 in f"}, ["y.py:4 in g"]) == (
        f"dtorch: executor 1 (pid 101) has been in plan {B} for 4 s, issued at x.py:3 in f. "
        "Meanwhile executor 0 is done with all that was issued; values are waited for at y.py:4 in g."
    )


def test_control_messages_are_read(scene: Scene) -> None:
    at = scene.writer.head
    scene.writer.send_control(encode(MakeLocals(1, 7, b"", None, None, "from_local(float32[4])")))
    scene.state.control[executor_line(0) + EXECUTOR_READ] = scene.writer.head
    scene.stand(1, at, CONTROL)
    scene.state.control[executor_line(1) + EXECUTOR_CONTROL] = at
    scene.watchdog.look(scene.pids, 0.0)
    found = scene.watchdog.look(scene.pids, 5.0)
    assert found is not None and "has been in from_local(float32[4]) on ranks 1, 3 (cpu:1, cpu:3)" in text_of(found)
    scene.writer.send_control(b"no pickle")
    scene.state.control[executor_line(1) + EXECUTOR_CONTROL] = scene.writer.head
    scene.watchdog.look(scene.pids, 6.0)
    found = scene.watchdog.look(scene.pids, 11.0)
    assert found is not None and "has been in a control message for" in text_of(found)


def test_names_do_not_grow_for_ever() -> None:
    fd = os.memfd_create("names")
    try:
        names = Names(fd)
        names.add_mesh(1, "cpu", (4, 5), (0, 1))
        for i in range(40_000):
            names.add_plan(100 + i, PlanName("x" * 2000, 1))
        assert os.fstat(fd).st_size <= 17 << 20
        reader = Names(fd)
        assert reader.plan(100) is None
        assert reader.plan(40_099) == PlanName("x" * 1000, 1, False)
        assert reader.ranks(1, 1) == "rank 1 (cpu:5)" and reader.ranks(1, 7) == "" and reader.ranks(2, 0) == ""
    finally:
        os.close(fd)


def test_stacks_come_one_after_the_other_and_are_not_waited_for_long() -> None:
    stacks = Stacks()
    asked: list[int] = []

    def ask(executor: int) -> None:
        asked.append(executor)
        if executor != 1:
            os.write(stacks.fd, b'Current thread 0x1 (most recent call first):\n  File "a.py", line 3 in f\n')
            os.write(stacks.fd, b'  File "child.py", line 9 in become_executor\n  File "w.py", line 1 in serve\n')

    began = time.monotonic()
    stacks.begin([0, 1, 2], ask)
    while (found := stacks.step()) is None:
        time.sleep(stacks.wait)
    assert asked == [0, 1, 2]
    answer = 'Current thread 0x1 (most recent call first):\n  File "a.py", line 3 in f'
    assert found[0] == found[2] == answer and "no answer" in found[1]
    assert 0.5 <= time.monotonic() - began < 5
    assert not stacks.busy
    stacks.close()


def test_executors_can_be_asked_for_stacks_by_nobody_else(tmp_path: Path) -> None:
    """A signal that programs use for themselves, SIGUSR1, is left to them."""
    mesh = init_device_mesh("cpu", (2,))
    path = str(tmp_path / "handled")

    def local(rank: int) -> torch.Tensor:
        before = signal.getsignal(signal.SIGUSR1)
        if rank == 1:
            signal.signal(signal.SIGUSR1, lambda *_: Path(path).touch())
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.01)
            signal.signal(signal.SIGUSR1, before)
        return torch.tensor([float(before == signal.SIG_DFL)])

    made = dtorch.from_local(local, mesh, [Shard(0)], shape=(2,))
    assert made.tolist() == [1, 1] and Path(path).exists()
    assert client().pool.check()


# -- who waits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_those_who_wait_are_found_in_any_loop(backend: str, held: tuple[dtorch.Tensor, Callable[[], object]]) -> None:
    """Tasks that wait for values, by whatever form; not those that wait for something else, nor the loop's own."""
    made, release = held
    waiting = client().waiting

    async def awaits() -> None:
        await made  # line A

    async def through_another_call() -> None:
        await awaits()

    async def looks() -> None:
        await made.ready()  # line B

    async def sleeps() -> None:
        await anyio.sleep(0.3)

    found: list[list[str]] = []

    async def main() -> None:
        async with anyio.create_task_group() as group:
            for task in (awaits, through_another_call, looks, sleeps):
                group.start_soon(task)
            await anyio.sleep(0.1)
            found.append(waiters(waiting))
            release()

    anyio.run(main, backend=backend)
    lines = Path(__file__).read_text().splitlines()
    a, b = (next(i for i, line in enumerate(lines, 1) if line.endswith(f"# line {x}")) for x in "AB")
    here = os.path.relpath(__file__)
    assert sorted(found[0]) == [f"{here}:{a} in awaits (2 times)", f"{here}:{b} in looks"]
    assert waiters(waiting) == []


def test_threads_that_wait_are_found_by_their_lines(held: tuple[dtorch.Tensor, Callable[[], object]]) -> None:
    made, release = held

    def work() -> None:
        made.sum().item()  # line C

    threads = [threading.Thread(target=work) for _ in range(12)]
    for thread in threads:
        thread.start()
    line = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# line C"))
    wanted = [f"{os.path.relpath(__file__)}:{line} in work (12 times)"]
    deadline = time.monotonic() + 20
    while (found := waiters(client().waiting)) != wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert found == wanted
    release()
    for thread in threads:
        thread.join(20)
