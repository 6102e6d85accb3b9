"""``on_executor_death="restart"`` and the hooks of ``dtorch.on_restart``: threads, asyncio, uvloop and trio."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest
import torch

import dtorch
from dtorch import Replicate
from dtorch.runtime import client as pools
from dtorch.runtime import config
from dtorch.runtime.restarting import hooks

from .scripts import run_body

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def mesh() -> Iterator[dtorch.DeviceMesh]:
    dtorch.shutdown()
    before = config.current()
    dtorch.configure(on_executor_death="restart")
    pools._budget.clear()
    yield dtorch.init_device_mesh("cpu", (2,))
    for hook in hooks():
        hook.remove()
    dtorch.shutdown()
    dtorch.configure(on_executor_death=before.on_executor_death, max_restarts=before.max_restarts)
    pools._budget.clear()


def kill(executor: int = 0) -> float:
    """Kill an executor once it runs, and wait until that is known; when it was killed."""
    pool = pools.in_use()
    pool.start(2)
    began = time.monotonic()
    os.kill(pool.pool.pids[executor], signal.SIGKILL)
    until(lambda: pool.is_dead)
    return began


def until(what: Callable[[], Any], seconds: float = 30) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.005)
    return found


def never(rank: int) -> torch.Tensor:
    time.sleep(60)
    return torch.ones(1)


class Model:
    """A model whose weights a hook loads, and what it answers."""

    def __init__(self, mesh: dtorch.DeviceMesh) -> None:
        self.mesh = mesh
        self.module = dtorch.distribute_module(torch.nn.Linear(2, 2), mesh)
        self.weights = {k: v.to_torch().clone() for k, v in self.module.state_dict().items()}
        self.loads = 0
        self.expected = self.answer().tolist()

    def load(self) -> None:
        self.module.load_state_dict(self.weights)
        self.loads += 1

    def answer(self) -> Any:
        return self.module(dtorch.distribute_tensor(torch.ones(1, 2), self.mesh, [Replicate()]))


def test_the_next_use_gets_a_fresh_pool_and_nothing_is_lost_silently(mesh: dtorch.DeviceMesh) -> None:
    old = dtorch.ones(3, device_mesh=mesh)
    pending = [dtorch.from_local(never, mesh, [Replicate()], shape=(1,)).to_torch_async() for _ in range(3)]
    dead = pools.client()
    began = kill(1)
    for future in pending:
        with pytest.raises(dtorch.ExecutorDiedError, match="SIGKILL"):
            future.get(timeout=5)
    assert time.monotonic() - began < 1
    # What was issued is not waited for on a fresh pool, where it never was.
    with pytest.raises(dtorch.ExecutorDiedError):
        dtorch.Graph.sync()
    assert pools.current_client() is dead
    assert dtorch.ones(2, device_mesh=mesh).sum().item() == 2
    assert pools.current_client() is not dead
    for use in (
        old.to_torch,
        lambda: (old + 1).to_torch(),
        lambda: old.redistribute(placements=[Replicate()]).tolist(),
    ):
        with pytest.raises(dtorch.TensorLostError):
            use()
    dtorch.Graph.sync()
    # A factory that has a plan already is a use as well.
    kill()
    assert dtorch.ones(2, device_mesh=mesh).tolist() == [1, 1]


def test_hooks_run_once_before_any_other_thread_gets_through(mesh: dtorch.DeviceMesh) -> None:
    model = Model(mesh)
    seen: list[Any] = []

    @dtorch.on_restart
    def first() -> None:
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")))
        time.sleep(0.2)
        model.load()

    async def second() -> None:
        assert model.loads == 1
        await asyncio.sleep(0.1)
        seen.append((await model.answer()).tolist())

    handle = dtorch.on_restart(second)
    kill()
    answers: list[Any] = []

    def ask() -> None:
        answers.append((model.answer().tolist(), len(seen)))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for t in threads:
        t.start()
    # Hooks know nothing of the modes of whoever came first.
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        dtorch.ones(1)
    for t in threads:
        t.join()
    assert answers == [(model.expected, 2)] * 8
    assert model.loads == 1 and seen == [(True, False, False), model.expected]
    # An explicit restart runs them too, but not those that were removed.
    handle.remove()
    handle.remove()
    dtorch.restart()
    assert model.loads == 2 and len(seen) == 3
    assert model.answer().tolist() == model.expected
    # After shutdown() there is nothing to restore.
    dtorch.shutdown()
    dtorch.Graph.sync()
    dtorch.ones(1).tolist()
    assert model.loads == 2


def test_a_hook_that_fails_leaves_the_pool_broken_with_its_error(mesh: dtorch.DeviceMesh) -> None:
    good = False

    @dtorch.on_restart
    def reload() -> None:
        if not good:
            raise FileNotFoundError("no weights here")

    kill()
    for use in (lambda: dtorch.ones(2), lambda: dtorch.ones(2), dtorch.restart, lambda: dtorch.tensor([1.0])):
        with pytest.raises(dtorch.PoolError, match=r"on_restart hook failed: FileNotFoundError: no weights") as caught:
            use()
        assert isinstance(caught.value.__cause__, FileNotFoundError)

    async def ask() -> None:
        for _ in range(2):
            with pytest.raises(dtorch.PoolError, match="no weights here"):
                await dtorch.aio.recovered()
        with pytest.raises(dtorch.PoolError, match="no weights here"):
            dtorch.ones(2)

    asyncio.run(ask())
    good = True
    dtorch.restart()
    assert dtorch.ones(2).tolist() == [1, 1]
    with pytest.raises(TypeError, match="expected a function"):
        dtorch.on_restart(3)  # type: ignore[arg-type]


def test_a_death_while_hooks_run_starts_again(mesh: dtorch.DeviceMesh) -> None:
    model = Model(mesh)
    tries = 0

    @dtorch.on_restart
    def reload() -> None:
        nonlocal tries
        tries += 1
        model.load()
        if tries <= 2:
            kill(tries % 2)
        with pytest.raises(RuntimeError, match="inside an on_restart hook"):
            dtorch.restart()
        model.answer().tolist()

    kill()
    assert model.answer().tolist() == model.expected
    assert tries == 3


def test_pools_that_die_again_and_again_are_not_started_for_ever(mesh: dtorch.DeviceMesh) -> None:
    dtorch.configure(max_restarts=2)
    for _ in range(2):
        kill()
        assert dtorch.ones(2).tolist() == [1, 1]
    kill()
    for use in (lambda: dtorch.ones(2), lambda: dtorch.tensor([1.0])):
        with pytest.raises(
            dtorch.ExecutorDiedError, match=r"(?s)SIGKILL.*has started 2 pools within 60 s .*max_restarts"
        ):
            use()
    dtorch.restart()
    kill()
    assert dtorch.ones(2).tolist() == [1, 1]


def test_the_warden_counts_as_well(mesh: dtorch.DeviceMesh) -> None:
    dtorch.ones(2).tolist()
    pool = pools.client()
    os.kill(pool.pool.warden_pid or 0, signal.SIGKILL)
    until(lambda: pool.is_dead)
    assert dtorch.ones(2).tolist() == [1, 1]


def test_a_pool_that_is_killed_while_it_starts_is_started_again(mesh: dtorch.DeviceMesh) -> None:
    kill()
    value = dtorch.ones(2)
    starting = pools.client()
    os.kill(starting.pool.warden_pid or 0, signal.SIGKILL)
    with pytest.raises(dtorch.PoolError, match="SIGKILL"):
        value.tolist()
    assert dtorch.ones(2).tolist() == [1, 1]
    assert pools.client() is not starting


def test_ctrl_c_ends_the_wait_for_a_hook() -> None:
    body = """
        import os, signal, sys, threading, time
        import dtorch
        from dtorch.runtime.client import client
        dtorch.configure(on_executor_death="restart")
        begun = threading.Event()
        @dtorch.on_restart
        def never():
            begun.set()
            time.sleep(600)
        def interrupt():
            begun.wait()
            os.kill(os.getpid(), signal.SIGINT)
        dtorch.ones(1).tolist()
        threading.Thread(target=interrupt, daemon=True).start()
        try:
            dtorch.restart()
        except KeyboardInterrupt:
            print("interrupted once", flush=True)
        time.sleep(0.1)
    """
    done = run_body(body, timeout=60)
    assert done.stdout == "interrupted once\n" and "Traceback" not in done.stderr, done.stderr


def test_what_may_be_configured() -> None:
    for text in ("restart", "RESTART "):
        assert config.from_environ({"DTORCH_ON_EXECUTOR_DEATH": text}).on_executor_death == "restart"
    with pytest.raises(
        dtorch.ConfigError, match=r"""DTORCH_ON_EXECUTOR_DEATH='ignore': expected "raise" or "restart"$"""
    ):
        config.from_environ({"DTORCH_ON_EXECUTOR_DEATH": "ignore"})
    for wrong in ({"on_executor_death": None}, {"max_restarts": 0}, {"restart_window": 0}):
        with pytest.raises(dtorch.ConfigError):
            dtorch.configure(**wrong)


def test_raise_is_the_default(mesh: dtorch.DeviceMesh) -> None:
    dtorch.configure(on_executor_death="raise")
    dtorch.ones(2, device_mesh=mesh).tolist()
    kill()
    for _ in range(3):
        with pytest.raises(dtorch.ExecutorDiedError):
            dtorch.ones(2)
    # What is in force counts, not what was when the pool began.
    dtorch.configure(on_executor_death="restart")
    assert dtorch.ones(2).tolist() == [1, 1]


LOOPS: list[tuple[str, dict[str, Any]]] = [
    ("asyncio", {}),
    ("asyncio", {"use_uvloop": True}),
    ("trio", {}),
]


@pytest.mark.parametrize("session", [False, True])
@pytest.mark.parametrize(("backend", "options"), LOOPS, ids=["asyncio", "uvloop", "trio"])
def test_in_a_loop(mesh: dtorch.DeviceMesh, backend: str, options: dict[str, Any], session: bool) -> None:
    if options:
        pytest.importorskip("uvloop")
    model = Model(mesh)
    loop_thread = threading.current_thread()
    where: list[threading.Thread] = []

    @dtorch.on_restart
    def load() -> None:
        where.append(threading.current_thread())
        time.sleep(0.3)  # does not stop the loop
        model.load()

    @dtorch.on_restart
    async def look() -> None:
        where.append(threading.current_thread())
        await anyio.sleep(0.05)
        assert (await model.answer()).tolist() == model.expected

    async def body() -> None:
        pending = dtorch.from_local(never, mesh, [Replicate()], shape=(1,))
        errors: list[BaseException] = []

        async def wait() -> None:
            try:
                await pending
            except dtorch.ExecutorDiedError as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(wait)
            await pools.client().pool.ensure_async(2)
            began = time.monotonic()
            os.kill(pools.client().pool.pids[0], signal.SIGKILL)
        assert len(errors) == 5 and time.monotonic() - began < 1
        refused, longest = 0, 0.0
        while True:
            before = time.monotonic()
            await anyio.sleep(0.01)
            longest = max(longest, time.monotonic() - before)
            try:
                answer = await model.answer()
                break
            except dtorch.PoolRestartingError as error:
                assert error.retry_after > 0 and "aio.recovered()" in str(error)
                refused += 1
        assert answer.tolist() == model.expected and model.loads == 1
        assert refused > 1
        assert longest < 0.25, longest  # shorter than the plain hook sleeps
        assert where[0] is not loop_thread and where[1] is loop_thread

        await anyio.to_thread.run_sync(kill)
        if session:
            # Nobody has to come first.
            with anyio.fail_after(60):
                while model.loads < 2:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
        await dtorch.aio.recovered()
        await dtorch.aio.recovered()
        assert (await model.answer()).tolist() == model.expected and model.loads == 2

    async def main() -> None:
        if session:
            async with dtorch.aio.open(mesh=mesh):
                model.load()
                model.loads = 0
                await body()
        else:
            await body()

    anyio.run(main, backend=backend, backend_options=options)


def test_a_session_ends_though_its_pool_is_dead_or_broken(mesh: dtorch.DeviceMesh) -> None:
    async def dies(hook_fails: bool) -> None:
        async with dtorch.aio.open(mesh=mesh):
            dtorch.configure(on_executor_death="restart" if hook_fails else "raise")
            await anyio.to_thread.run_sync(kill)
            if hook_fails:
                with anyio.fail_after(60):
                    while (held := pools.in_use().restoration) is None or held.error is None:  # noqa: ASYNC110
                        await anyio.sleep(0.01)

    asyncio.run(dies(False))
    dtorch.configure(on_executor_death="restart")

    @dtorch.on_restart
    async def fails() -> None:
        await anyio.sleep(0.01)
        raise ValueError("no")

    asyncio.run(dies(True))
    assert pools.current_client() is None


def test_a_loop_that_ends_in_the_middle_of_hooks_leaves_them_to_the_next(mesh: dtorch.DeviceMesh) -> None:
    model = Model(mesh)
    begun = 0

    @dtorch.on_restart
    async def load() -> None:
        nonlocal begun
        begun += 1
        if begun == 1:
            await anyio.sleep(60)
        model.load()

    async def starts() -> None:
        with pytest.raises(dtorch.PoolRestartingError):
            dtorch.ones(2)
        while not begun:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    kill()
    asyncio.run(starts())
    assert model.answer().tolist() == model.expected
    assert begun == 2 and model.loads == 1
