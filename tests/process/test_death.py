"""The end of an executor, of the warden and of the client, at every moment and with everyone waiting.

What the pool itself does about a death is in test_pool.py; these tests go through dtorch as its users do.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard
from dtorch.errors import PoolError
from dtorch.runtime import client as pools
from dtorch.runtime.client import Client

from .scripts import ROOT

pytestmark = pytest.mark.timeout(180)

SECOND = 1.0
"""In which every waiter learns of a death."""


@pytest.fixture
def mesh() -> Iterator[dtorch.DeviceMesh]:
    """Two executors that are ready; whatever a test leaves of them is gone after it."""
    dtorch.shutdown()
    before = dtorch.configure()
    dtorch.configure(cpu_executors=2)
    found = dtorch.init_device_mesh("cpu", (2,))
    dtorch.ones(2, device_mesh=found).tolist()
    pools.client().start(2)
    yield found
    dtorch.shutdown()
    dtorch.configure(cpu_executors=before.cpu_executors)


def end(*executors: int, number: int = signal.SIGKILL) -> float:
    """Send a signal to executors; when."""
    pids = pools.in_use().pool.pids
    began = time.monotonic()
    for e in executors:
        os.kill(pids[e], number)
    return began


def dies(use: Callable[[], Any], began: float, match: str | None = None) -> BaseException:
    """`use` raises ExecutorDiedError, not later than a second after `began`."""
    with pytest.raises(dtorch.ExecutorDiedError, match=match) as caught:
        use()
    took = time.monotonic() - began
    assert took < SECOND, f"it took {took:.3f} s"
    return caught.value


def goes_on(mesh: dtorch.DeviceMesh) -> None:
    """After restart() all is well."""
    dtorch.restart()
    x = dtorch.distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    assert (x * 2).redistribute(placements=[Replicate()]).sum().item() == 56


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def until(what: Callable[[], Any], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def stuck(mesh: dtorch.DeviceMesh, rank: int = 1) -> dtorch.Tensor:
    """float32[4], Shard(0): `rank` is making its part by the time this returns, and will not be done."""
    read, write = os.pipe()
    path = f"/proc/{os.getpid()}/fd/{write}"

    def spin(r: int) -> torch.Tensor:
        if r == rank:
            with open(path, "w") as started:
                started.write("!")
            time.sleep(60)
        return torch.ones(2)

    made = dtorch.from_local(spin, mesh, [Shard(0)], shape=(4,))
    assert os.read(read, 1) == b"!"
    os.close(read)
    os.close(write)
    return made


# -- an executor dies, at every moment --------------------------------------------------------------------------------


def used_for_ever(mesh: dtorch.DeviceMesh) -> Callable[[], Any]:
    def use() -> None:
        while True:
            dtorch.ones(2, device_mesh=mesh).tolist()

    return use


def idle(mesh: dtorch.DeviceMesh) -> Callable[[], Any]:
    """Nobody waits for anything: the next uses learn of it, or those after them, within the second."""
    return used_for_ever(mesh)


def in_an_operator(mesh: dtorch.DeviceMesh) -> Callable[[], Any]:
    return stuck(mesh).to_torch_async().get


def in_a_collective(mesh: dtorch.DeviceMesh) -> Callable[[], Any]:
    """Rank 0 waits in it for rank 1, which does not come."""
    return stuck(mesh).redistribute(placements=[Replicate()]).to_torch_async().get


def in_a_long_kernel(mesh: dtorch.DeviceMesh) -> Callable[[], Any]:
    x = dtorch.randn(3000, 3000, device_mesh=mesh, placements=[Shard(0)])
    for _ in range(20):
        x = x @ dtorch.ones(3000, 3000, device_mesh=mesh)
    return x.sum().to_torch_async().get


def in_a_fetch(mesh: dtorch.DeviceMesh) -> Callable[[], Any]:
    """Of a large value, again and again."""
    x = dtorch.zeros(64 << 20, device_mesh=mesh, placements=[Shard(0)])

    def fetch() -> None:
        while True:
            x.to_torch()

    return fetch


def in_an_upload(mesh: dtorch.DeviceMesh) -> Callable[[], Any]:
    value = torch.zeros(4 << 20)

    def upload() -> None:
        while True:
            dtorch.distribute_tensor(value, mesh, [Shard(0)]).sum().item()

    return upload


def in_a_backward(mesh: dtorch.DeviceMesh) -> Callable[[], Any]:
    with dtorch.device_mesh(mesh):
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    optimizer = dtorch.optim.AdamW(model.parameters())

    def train() -> None:
        while True:
            x = dtorch.randn(16, 64, device_mesh=mesh, placements=[Shard(0)])
            with dtorch.auto_redistribute():
                loss = (model(x) ** 2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if torch.rand(()) < 0.1:
                loss.item()

    return train


def while_the_ring_is_full(mesh: dtorch.DeviceMesh) -> Callable[[], Any]:
    """The client waits for room, far ahead of an executor that is stuck."""
    t = stuck(mesh)

    def issue() -> None:
        nonlocal t
        while True:
            t = t + 1

    return issue


MOMENTS = [idle, in_an_operator, in_a_collective, in_a_long_kernel, in_a_fetch, in_an_upload, in_a_backward]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_death_is_raised_within_a_second(
    mesh: dtorch.DeviceMesh, moment: Callable[[dtorch.DeviceMesh], Callable[[], Any]]
) -> None:
    pid = pools.client().pool.pids[1]
    use = moment(mesh)
    began = 0.0

    def kill() -> None:
        nonlocal began
        began = end(1)

    if moment is idle:
        kill()
    else:
        threading.Timer(0.3, kill).start()
    with pytest.raises(dtorch.ExecutorDiedError) as caught:
        use()
    assert began and time.monotonic() - began < SECOND
    text = str(caught.value)
    assert text.startswith(f"executor 1 (pid {pid}) was ended by signal SIGKILL"), text
    assert "was rank 1 of DeviceMesh('cpu', (2))" in text and "dtorch.restart()" in text
    goes_on(mesh)


def test_a_death_while_the_client_waits_for_room(mesh: dtorch.DeviceMesh) -> None:
    before = dtorch.configure()
    dtorch.configure(run_ahead_soft=500, run_ahead_hard=1000)
    try:
        dtorch.restart()
        dtorch.ones(2, device_mesh=mesh).tolist()
        issue = while_the_ring_is_full(mesh)
        began = 0.0

        def kill() -> None:
            nonlocal began
            began = end(1)

        threading.Timer(0.3, kill).start()
        with pytest.raises(dtorch.ExecutorDiedError):
            issue()
        assert time.monotonic() - began < SECOND
    finally:
        dtorch.configure(run_ahead_soft=before.run_ahead_soft, run_ahead_hard=before.run_ahead_hard)
    goes_on(mesh)


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGSEGV, "SIGSEGV"), (signal.SIGABRT, "SIGABRT"), (signal.SIGBUS, "SIGBUS")]
)
def test_crashes_come_with_their_last_words(mesh: dtorch.DeviceMesh, number: int, name: str) -> None:
    waits = stuck(mesh).to_torch_async()
    began = end(1, number=number)
    error = dies(waits.get, began, rf"was ended by signal {name}")
    # faulthandler's, and the line of the user's own function.
    assert re.search(r"(?s)Its last lines on stderr:.*Fatal Python error.*in spin", str(error)), error


def test_an_exit_in_the_middle_of_a_collective(mesh: dtorch.DeviceMesh) -> None:
    def leave(rank: int) -> torch.Tensor:
        if rank == 1:
            print("not a day longer", file=sys.stderr, flush=True)
            os._exit(13)
        return torch.ones(2)

    left = dtorch.from_local(leave, mesh, [Shard(0)], shape=(4,))
    began = time.monotonic()
    dies(left.redistribute(placements=[Replicate()]).to_torch, began, r"(?s)ended with exit code 13.*not a day longer")
    goes_on(mesh)


def test_both_at_once_and_again(mesh: dtorch.DeviceMesh) -> None:
    for executors in ((0, 1), (1, 0), (0,)):
        waits = [stuck(mesh).to_torch_async(), dtorch.ones(3, device_mesh=mesh).to_torch_async()]
        began = end(*executors)
        dies(waits[0].get, began, r"executor [01] \(pid \d+\) was ended by signal SIGKILL")
        with contextlib.suppress(dtorch.ExecutorDiedError):
            waits[1].get(timeout=5)
        goes_on(mesh)


def test_the_warden_dies(mesh: dtorch.DeviceMesh) -> None:
    pool = pools.client().pool
    pids = list(pool.pids.values())
    waits = stuck(mesh).to_torch_async()
    began = time.monotonic()
    os.kill(pool.warden_pid or 0, signal.SIGKILL)
    with pytest.raises(PoolError, match=r"warden .* SIGKILL"):
        waits.get(timeout=5)
    assert time.monotonic() - began < SECOND
    assert until(lambda: all(map(gone, pids)), 2)
    with pytest.raises(PoolError):
        dtorch.ones(2)
    goes_on(mesh)


def test_peers_are_freed_from_a_collective_at_once(mesh: dtorch.DeviceMesh) -> None:
    """Rank 0 leaves the exchange it waits in: its process does nothing from then on, and ends with the pool."""
    waits = stuck(mesh).redistribute(placements=[Replicate()]).to_torch_async()
    client = pools.client()
    peer = client.pool.pids[0]
    end(1)
    with pytest.raises(dtorch.ExecutorDiedError):
        waits.get(timeout=5)
    assert not gone(peer)
    # Were it still in the exchange it would not end when it is asked, but be killed after a second.
    began = time.monotonic()
    dtorch.shutdown()
    assert gone(peer) and time.monotonic() - began < 0.9


def test_values_that_were_there_stay_and_tensors_are_lost(mesh: dtorch.DeviceMesh) -> None:
    good = dtorch.arange(4, device_mesh=mesh)
    fetched, future = good.to_torch(), good.to_torch_async()
    assert future.wait(10)
    partial = dtorch.ones(2, device_mesh=mesh).redistribute(placements=[Partial()])
    leaf = dtorch.ones(2, device_mesh=mesh).requires_grad_()
    loss = (leaf * 2).sum()
    began = end(0)
    dies(used_for_ever(mesh), began)
    assert future.get().tolist() == [0, 1, 2, 3] == fetched.tolist()
    assert good.shape == (4,) and good.placements == [Replicate()]
    for use in (good.to_torch, lambda: (good + 1).to_torch(), loss.backward, partial.to_torch):
        with pytest.raises((dtorch.ExecutorDiedError, dtorch.TensorLostError)):
            use()
    dtorch.restart()
    uses: list[Callable[[], Any]] = [
        good.to_torch,
        lambda: good.to_torch_async().get(),
        lambda: (good + 1).to_torch(),
        lambda: good.add_(1).to_torch(),
        lambda: good.redistribute(placements=[Shard(0)]).to_torch(),
        lambda: good[1:].to_torch(),
        lambda: torch.cat([good, dtorch.arange(2, device_mesh=mesh)]).to_torch(),
        lambda: asyncio.run(awaited(good)),
        partial.to_torch,
        lambda: repr(good),
        lambda: bool((good == 1).any()),
    ]
    for use in uses:
        with pytest.raises(dtorch.TensorLostError, match="ended with the pool"):
            use()
    assert dtorch.arange(4, device_mesh=mesh).tolist() == [0, 1, 2, 3]


async def awaited(t: dtorch.Tensor) -> torch.Tensor:
    return await t


# -- while the pool starts and ends -----------------------------------------------------------------------------------


def test_deaths_while_executors_start() -> None:
    dtorch.shutdown()
    mesh = dtorch.init_device_mesh("cpu", (2,))
    for _ in range(2):
        value = dtorch.ones(4, device_mesh=mesh, placements=[Shard(0)]).to_torch_async()
        pool = pools.client().pool
        assert until(lambda pool=pool: 0 in pool.pids or not pool.check(), 60)
        began = end(0)
        # It may have been done before.
        with contextlib.suppress(dtorch.ExecutorDiedError):
            value.get(timeout=5)
        assert time.monotonic() - began < SECOND
        dies(used_for_ever(mesh), began)
        goes_on(mesh)
        dtorch.shutdown()


def test_deaths_while_the_pool_ends(mesh: dtorch.DeviceMesh) -> None:
    for wait in (0.0, 0.001, 0.005, 0.02):
        pool = pools.client().pool
        pids = [pool.warden_pid, *pool.pids.values()]
        stuck(mesh)

        def kill(wait: float = wait, pids: list[Any] = pids) -> None:
            time.sleep(wait)
            for pid in pids[1:]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        began = time.monotonic()
        dtorch.shutdown()
        assert time.monotonic() - began < 3
        killer.join()
        assert until(lambda pids=pids: all(gone(p) for p in pids if p), 2)
        assert dtorch.ones(2, device_mesh=mesh).tolist() == [1, 1]
        pools.client().start(2)


def test_deaths_during_restart(mesh: dtorch.DeviceMesh) -> None:
    """Of the old pool's processes, and of the new one's: restart() or the next use says so, and nothing hangs."""
    stop = threading.Event()

    def kill_whatever_comes() -> None:
        while not stop.is_set():
            found: Client | None = pools.current_client()
            if found is not None and not found.closed:
                for pid in [*found.pool.pids.values()]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)

    killer = threading.Thread(target=kill_whatever_comes)
    killer.start()
    try:
        for _ in range(3):
            began = time.monotonic()
            with contextlib.suppress(PoolError, dtorch.TensorLostError):
                dtorch.restart()
                dtorch.ones(2, device_mesh=mesh).tolist()
            assert time.monotonic() - began < 60
    finally:
        stop.set()
        killer.join()
    goes_on(mesh)


def test_two_threads_may_restart_at_once(mesh: dtorch.DeviceMesh) -> None:
    end(0)
    threads = [threading.Thread(target=dtorch.restart) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    goes_on(mesh)


# -- whoever waits ----------------------------------------------------------------------------------------------------


def test_threads_learn_of_it_all_at_once(mesh: dtorch.DeviceMesh) -> None:
    t = stuck(mesh)
    future = t.to_torch_async()
    took: list[tuple[float, BaseException]] = []
    called = threading.Event()
    waits: list[Callable[[], Any]] = [
        future.get,
        lambda: future.result(timeout=30),
        t.tolist,
        lambda: raises(future.exception()),
        dtorch.Graph.sync,
        lambda: (t + 1).sum().item(),
        lambda: next(iter(concurrent_first([future]))).result(),
    ]
    future.add_done_callback(lambda _: called.set())

    def wait(use: Callable[[], Any]) -> None:
        try:
            use()
        except BaseException as error:
            took.append((time.monotonic(), error))

    threads = [threading.Thread(target=wait, args=(use,)) for use in waits * 2]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    began = end(1)
    for thread in threads:
        thread.join(10)
    assert len(took) == len(threads)
    for at, error in took:
        assert type(error) is dtorch.ExecutorDiedError and at - began < SECOND, (at - began, error)
    assert called.wait(SECOND)


def raises(error: BaseException | None) -> None:
    assert error is not None
    raise error


def concurrent_first(futures: list[Any]) -> set[Any]:
    return concurrent.futures.wait(futures, return_when="FIRST_COMPLETED").done


@pytest.mark.parametrize("backend", ["asyncio", "uvloop", "trio"])
def test_tasks_learn_of_it_all_at_once(mesh: dtorch.DeviceMesh, backend: str) -> None:
    """Those that wait for values, in a batch, for the next of a loader, or are held back."""
    if backend == "uvloop":
        pytest.importorskip("uvloop")
    outcomes: dict[str, tuple[float, BaseException]] = {}

    @dtorch.aio.batched(max_size=4, max_delay=0.001)
    async def double(x: torch.Tensor) -> torch.Tensor:
        return dtorch.distribute_tensor(x, mesh, [Replicate()]) * total

    t = stuck(mesh)
    total = t.redistribute(placements=[Replicate()]).sum()

    async def main() -> None:

        async def fetch() -> Any:
            return await t

        async def ready() -> Any:
            await t.ready()

        async def sync() -> Any:
            await dtorch.Graph.sync_async()

        async def gather() -> Any:
            return await dtorch.aio.gather(t, t + 1)

        async def completed() -> Any:
            async for _ in dtorch.aio.as_completed(t, t + 1):
                pass

        async def batch() -> Any:
            return await double(torch.ones(1, 2))

        async def load() -> Any:
            loader = ((torch.ones(2),) for _ in range(1000))
            async for (x,) in dtorch.aio.prefetch(loader, mesh, [Replicate()], depth=2):
                await (x + total)

        async def data() -> Any:
            return await dtorch.aio.nonzero(t)

        async def thread() -> Any:
            return await anyio.to_thread.run_sync(t.tolist)

        async def note(name: str, wait: Callable[[], Any]) -> None:
            try:
                await wait()
            except Exception as error:
                outcomes[name] = (time.monotonic(), error)

        async with anyio.create_task_group() as tasks:
            for wait in (fetch, ready, sync, gather, completed, batch, load, data, thread):
                tasks.start_soon(note, wait.__name__, wait)
            await anyio.sleep(0.5)
            assert not outcomes
            outcomes["began"] = (end(1), ValueError())

    if backend == "uvloop":
        anyio.run(main, backend="asyncio", backend_options={"use_uvloop": True})
    else:
        anyio.run(main, backend=backend)
    began, _ = outcomes.pop("began")
    assert len(outcomes) == 9
    for name, (at, error) in outcomes.items():
        assert isinstance(error, dtorch.ExecutorDiedError), (name, error)
        assert at - began < SECOND, (name, at - began)


# -- memory runs out --------------------------------------------------------------------------------------------------

_MEMORY = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of little memory, where this machine lets one be made."""
    group = _MEMORY / f"dtorch-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(600 << 20))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    with contextlib.suppress(OSError):  # there is no swap to be accounted for
        (group / "memory.memsw.limit_in_bytes").write_text(str(600 << 20))
    yield group
    assert until(lambda: not (group / "cgroup.procs").read_text(), 10)
    group.rmdir()


def test_an_executor_that_the_kernel_ends_for_memory(mesh: dtorch.DeviceMesh, small_group: Path) -> None:
    pid = pools.client().pool.pids[1]
    (small_group / "cgroup.procs").write_text(str(pid))

    def take(rank: int) -> torch.Tensor:
        if rank == 1:
            torch.ones(1 << 30, dtype=torch.uint8)
        return torch.ones(2)

    waits = dtorch.from_local(take, mesh, [Shard(0)], shape=(4,)).to_torch_async()
    with pytest.raises(dtorch.ExecutorDiedError, match=rf"\(pid {pid}\).*SIGKILL \(by the kernel because memory"):
        waits.get(timeout=60)
    assert until(lambda: gone(pid), 5)
    goes_on(mesh)
    # One that is killed by hand is not taken for another of those.
    dies(used_for_ever(mesh), end(0), "killed by hand, or by the kernel")


# -- the client dies --------------------------------------------------------------------------------------------------

ENDS = [
    ("pass", (0,)),
    ("raise RuntimeError('no')", (1,)),
    ("sys.exit(3)", (3,)),
    ("os._exit(7)", (7,)),
    ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)", (-signal.SIGTERM,)),
    ("os.kill(os.getpid(), signal.SIGHUP); time.sleep(30)", (-signal.SIGHUP,)),
    ("os.kill(os.getpid(), signal.SIGKILL); time.sleep(30)", (-signal.SIGKILL,)),
    ("os.abort()", (-signal.SIGABRT,)),
]


@pytest.mark.parametrize(("last", "status"), ENDS, ids=[e[0].split(";")[0] for e in ENDS])
def test_nothing_outlives_the_client(last: str, status: tuple[int, ...], tmp_path: Path) -> None:
    """One executor is inside an operator, the other waits for it in a collective, and values are on their way."""
    body = f"""
        import os, signal, sys, time
        import torch, dtorch
        from dtorch.runtime.client import client
        mesh = dtorch.init_device_mesh("cpu", (2,))
        def spin(rank):
            time.sleep(60 if rank else 0)
            return torch.ones(2)
        kept = dtorch.rand(1 << 20, device_mesh=mesh).to_torch()
        stuck = dtorch.from_local(spin, mesh, [dtorch.Shard(0)], shape=(4,))
        waits = stuck.redistribute(placements=[dtorch.Replicate()]).to_torch_async()
        client().start(2)
        print(client().pool.warden_pid, *client().pool.pids.values(), flush=True)
        {last}
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "DTORCH_CPU_EXECUTORS": "2"}
    before = {p.name for p in Path("/dev/shm").iterdir()}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(body)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        cwd=tmp_path,
    )
    assert process.stdout is not None and process.stderr is not None
    pids = [int(p) for p in process.stdout.readline().split()]
    assert len(pids) == 3, process.stderr.read()
    assert process.wait(30) in status
    assert until(lambda: all(map(gone, pids)), 2), [p for p in pids if not gone(p)]
    process.communicate()
    assert {p.name for p in Path("/dev/shm").iterdir()} <= before
    assert not [p for p in tmp_path.rglob("*") if p.name != "core"]
