"""The failures page of the design, on real executors: who is told what, what is lost, and what is not."""

from __future__ import annotations

import asyncio
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

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard, init_device_mesh
from dtorch.runtime.client import client

from .scripts import ROOT


@pytest.fixture
def mesh() -> dtorch.DeviceMesh:
    """Two ranks, each on an executor of its own."""
    return init_device_mesh("cpu", (2,))


@pytest.fixture(autouse=True)
def _settled() -> Iterator[None]:
    """No test leaves failures that nobody asked for to the summary at the end of the session."""
    yield
    c = client()
    c.drain()
    c.failures._asked |= set(c.failures._reports)


@pytest.fixture
def breaks_the_pool() -> Iterator[None]:
    """The pool may be broken: the next test gets another."""
    yield
    dtorch.shutdown()


def bad_rows(mesh: dtorch.DeviceMesh, rank: int = 1) -> dtorch.Tensor:
    """float32[4, 4], Shard(0), made by an embedding that fails on `rank` alone."""
    weight = dtorch.ones(8, 4, device_mesh=mesh)
    rows = torch.zeros(4, dtype=torch.int64)
    rows[2 * rank] = 99
    return torch.nn.functional.embedding(dtorch.distribute_tensor(rows, mesh, [Shard(0)]), weight)


def bad_everywhere(mesh: dtorch.DeviceMesh) -> dtorch.Tensor:
    """float32[4, 4], Replicate, that failed."""
    return bad_rows(mesh).redistribute(placements=[Replicate()])


def line_here() -> int:
    return sys._getframe(1).f_lineno


# -- an operator fails on an executor -------------------------------------------------------------------------------


def test_the_error_says_what_where_and_who(mesh: dtorch.DeviceMesh) -> None:
    weight = dtorch.ones(8, 4, device_mesh=mesh)
    rows = dtorch.distribute_tensor(torch.tensor([0, 1, 2, 99]), mesh, [Shard(0)])
    out = torch.nn.functional.embedding(rows, weight)
    line = line_here() - 1
    later = (out * 2).relu()
    with pytest.raises(IndexError, match="index out of range in self") as caught:
        later.to_torch()
    error = caught.value
    assert isinstance(error, dtorch.RemoteError)
    assert error.rank == 1
    assert error.operator == "embedding(weight float32[8, 4] [Replicate()], indices int64[4] [Shard(0)])"
    here = os.path.relpath(__file__, os.getcwd())
    assert error.site == f"{here}:{line} in test_the_error_says_what_where_and_who"
    notes = "\n".join(error.__notes__)
    assert f"in {error.operator} on rank 1 (cpu:1, executor 1, pid {client().pool.pids[1]})" in notes
    assert f"issued at {error.site}, " in notes
    assert re.search(r"\b\d+ commands before this was asked for", notes)
    assert "Traceback" in error.executor_traceback and error.executor_traceback.rstrip() in notes


def test_asking_again_raises_again(mesh: dtorch.DeviceMesh) -> None:
    bad = bad_rows(mesh)
    future = bad.to_torch_async()
    for _ in range(2):
        with pytest.raises(IndexError):
            future.get()
        with pytest.raises(IndexError):
            bad.sum().to_torch()
        with pytest.raises(IndexError):
            asyncio.run(bad.ready())
    assert isinstance(future.exception(), IndexError)


class CustomError(Exception):
    """Two arguments: such a class does not survive pickle by itself."""

    def __init__(self, what: str, count: int) -> None:
        super().__init__(f"{what} {count}")


def test_an_exception_class_of_the_user(mesh: dtorch.DeviceMesh) -> None:
    def make(rank: int) -> torch.Tensor:
        if rank == 1:
            raise CustomError("nothing for", rank)
        return torch.ones(2)

    made = dtorch.from_local(make, mesh, [Shard(0)], shape=(4,))
    with pytest.raises(CustomError, match="nothing for 1") as caught:
        made.to_torch()
    assert isinstance(caught.value, dtorch.RemoteError) and caught.value.rank == 1
    assert "in make\n" in caught.value.executor_traceback


def test_several_ranks_on_one_executor_name_the_one_that_failed() -> None:
    mesh = init_device_mesh("cpu", (6,))
    rows = torch.zeros(6, dtype=torch.int64)
    rows[4] = 99
    weight = dtorch.ones(8, 4, device_mesh=mesh)
    for _ in range(2):  # the first run of a plan is not like the later ones
        bad = torch.nn.functional.embedding(dtorch.distribute_tensor(rows, mesh, [Shard(0)]), weight)
        with pytest.raises(IndexError) as caught:
            bad.to_torch()
        assert isinstance(caught.value, dtorch.RemoteError) and caught.value.rank == 4


def test_wrong_calls_raise_at_the_call(mesh: dtorch.DeviceMesh) -> None:
    x = dtorch.ones(4, 128, device_mesh=mesh, placements=[Shard(1)])
    here = os.path.relpath(__file__, os.getcwd())
    with pytest.raises(dtorch.PlacementError) as placement:
        x.softmax(-1)
    line = line_here() - 1
    assert str(placement.value).endswith(f"\n  {here}:{line} in test_wrong_calls_raise_at_the_call")
    a, b = dtorch.ones(2, 3, device_mesh=mesh), dtorch.ones(4, 5, device_mesh=mesh)
    with pytest.raises(RuntimeError) as shapes:
        a @ b
    line = line_here() - 1
    with pytest.raises(RuntimeError) as as_torch:
        torch.ones(2, 3) @ torch.ones(4, 5)
    assert str(shapes.value) == str(as_torch.value)
    assert shapes.value.__notes__ == [f"  {here}:{line} in test_wrong_calls_raise_at_the_call"]


# -- poison ---------------------------------------------------------------------------------------------------------


def test_dependents_are_poisoned_and_nothing_else(mesh: dtorch.DeviceMesh) -> None:
    good = dtorch.arange(4, device_mesh=mesh).float()
    bad = bad_everywhere(mesh)
    for dependent in (bad + good, (bad @ bad).sum(), bad.t(), torch.cat([good, bad[0]]), bad.split(2)[1]):
        with pytest.raises(IndexError):
            dependent.to_torch()
    assert (good * 2).tolist() == [0, 2, 4, 6]
    rows = bad_rows(mesh)  # failed on rank 1 alone
    assert rows.to_local(0).tolist() == torch.ones(2, 4).tolist()
    with pytest.raises(IndexError):
        rows.to_local(1)


def test_a_rank_that_failed_takes_part_in_redistribution(mesh: dtorch.DeviceMesh) -> None:
    moves: list[tuple[list[Any], list[Any]]] = [
        ([Shard(0)], [Replicate()]),
        ([Shard(0)], [Shard(1)]),
        ([Partial()], [Replicate()]),
        ([Partial()], [Shard(0)]),
    ]
    for source, target in moves:
        for rank in (0, 1):
            bad = bad_rows(mesh, rank)
            if source != [Shard(0)]:
                bad = bad.sum(0)  # Partial
            moved = bad.redistribute(placements=target)
            for r in (0, 1):
                with pytest.raises(IndexError) as caught:
                    moved.to_local(r)
                assert isinstance(caught.value, dtorch.RemoteError) and caught.value.rank == rank
            # The next exchange is right, and so is the next value.
            x = torch.arange(4.0)
            assert (
                dtorch.distribute_tensor(x, mesh, [Shard(0)])
                .redistribute(placements=[Replicate()])
                .to_local(1)
                .equal(x)
            )


def test_the_root_cause_is_raised(mesh: dtorch.DeviceMesh) -> None:
    first = bad_rows(mesh)
    first_line = line_here() - 1
    moved = first.redistribute(placements=[Replicate()])
    dtorch.from_local(_fails, mesh, [Shard(0)], shape=(4,))  # another failure in between, nothing to do with it
    again = moved.chunk(2)[0].contiguous().redistribute(placements=[Shard(0)]).redistribute(placements=[Replicate()])
    with pytest.raises(IndexError) as caught:
        again.to_torch()
    assert isinstance(caught.value, dtorch.RemoteError)
    assert f":{bad_rows.__code__.co_firstlineno + 5} in bad_rows" in caught.value.site, first_line


def _fails(rank: int) -> torch.Tensor:
    raise ValueError("unrelated")


@pytest.mark.parametrize("numel", [8, 600_000])  # the fast path, and the general way
@pytest.mark.parametrize("together", [False, True])
def test_a_failure_inside_an_exchange_is_known_before_a_peer_is_asked(
    mesh: dtorch.DeviceMesh, numel: int, together: bool
) -> None:
    def arm(rank: int) -> torch.Tensor:
        if rank == 1:
            shm, failing = sys.modules["dtorch.executor.shm_collectives"], sys.modules["dtorch.executor.failing"]
            reducing = sys.modules["dtorch.executor.redistribution"]
            reduce_line, report, barrier = reducing._reduce_line, failing.Failing.report, shm.Group.barrier

            armed = [True]

            def barrier_once(group: Any, poison: int = 0) -> int:
                if armed and armed.pop():
                    raise MemoryError("in the middle")
                return barrier(group, poison)

            def report_late(*args: Any) -> None:
                failing.Failing.report = report
                time.sleep(0.2)
                report(*args)

            def line_once(*args: Any) -> int:
                reducing._reduce_line = reduce_line
                raise MemoryError("in the middle")

            failing.Failing.report = report_late
            if numel > 8 or together:
                reducing._reduce_line = line_once
            else:
                shm.Group.barrier = barrier_once
        return torch.zeros(1)

    x = dtorch.ones(2, numel, device_mesh=mesh, placements=[Shard(0)])
    dtorch.from_local(arm, mesh, [Shard(0)], shape=(2,)).to_torch()
    if together:
        weights = [torch.nn.Parameter(dtorch.ones(numel // 2, device_mesh=mesh)) for _ in range(2)]
        halves = x.redistribute(placements=[Shard(0)]).split(numel // 2, 1)
        torch.stack([(h * w).sum() for h, w in zip(halves, weights, strict=True)]).sum().redistribute(
            placements=[Replicate()]
        ).backward()
        moved = weights[0].grad
    else:
        moved = x.sum(0).redistribute(placements=[Replicate()])
    for rank in (0, 1):
        with pytest.raises(MemoryError, match="in the middle") as caught:
            moved.to_local(rank)
        assert isinstance(caught.value, dtorch.RemoteError) and caught.value.rank == 1
    again = x.sum(0).redistribute(placements=[Replicate()])
    assert again.to_local(0).eq(2).all() and again.to_local(1).eq(2).all()


def test_failure_inside_an_exchange_of_several(mesh: dtorch.DeviceMesh) -> None:
    """Gradients that move together, of which one has failed on one rank."""
    good = torch.nn.Parameter(dtorch.ones(4, device_mesh=mesh))
    rows = bad_rows(mesh)
    x = dtorch.ones(4, 4, device_mesh=mesh, placements=[Shard(0)])
    ((x * good).sum() + (rows * good).sum()).redistribute(placements=[Replicate()]).backward()
    with pytest.raises(IndexError):
        good.grad.to_torch()
    good.grad = None
    (x * good).sum().redistribute(placements=[Replicate()]).backward()
    assert good.grad.tolist() == [4, 4, 4, 4]


# -- writes ---------------------------------------------------------------------------------------------------------


def _add(targets: list[torch.Tensor], bad: torch.Tensor) -> None:
    for t in targets:
        t.add_(bad)


def _foreach(targets: list[torch.Tensor], bad: torch.Tensor) -> None:
    torch._foreach_add_(targets, [torch.zeros_like(t) for t in targets[:-1]] + [bad])


def _fused(targets: list[torch.Tensor], bad: torch.Tensor) -> None:
    torch._foreach_addcmul_(targets, [bad] * len(targets), [bad] * len(targets), 0.5)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
@pytest.mark.parametrize("write", [_add, _foreach, _fused])
def test_a_write_with_a_poisoned_input_is_not_done(
    mesh: dtorch.DeviceMesh, write: Callable[..., None], placement: Any
) -> None:
    old = torch.arange(16.0).view(4, 4)
    for _ in range(2):
        targets = [dtorch.distribute_tensor(old, mesh, [placement]) for _ in range(3)]
        view, alias = targets[0][:, :2], targets[0].detach()
        write(targets, bad_everywhere(mesh).redistribute(placements=[placement]))
        for t in (*targets, view, alias):
            with pytest.raises(IndexError):
                t.to_torch()
        targets[0].mul_(2)  # nor is a later write
        dtorch.clear_errors()
        for t in (*targets, alias):
            assert t.to_torch().equal(old)
        assert view.to_torch().equal(old[:, :2])
        targets[0].mul_(2)
        assert view.to_torch().equal(2 * old[:, :2])


def test_a_write_that_some_ranks_did_is_lost(mesh: dtorch.DeviceMesh) -> None:
    t = dtorch.zeros(4, 4, device_mesh=mesh, placements=[Shard(0)])
    other = dtorch.zeros(4, 4, device_mesh=mesh, placements=[Shard(0)])
    t.add_(bad_rows(mesh))
    with pytest.raises(IndexError):
        t.to_torch()
    dtorch.clear_errors()
    for _ in range(2):
        with pytest.raises(dtorch.TensorLostError, match=r"Write:  t\.copy_"):
            t.to_torch()
    with pytest.raises(dtorch.TensorLostError):
        (t + 1).redistribute(placements=[Replicate()]).to_torch()
    dtorch.clear_errors()
    with pytest.raises(dtorch.TensorLostError):
        t.to_torch()
    assert other.sum().item() == 0
    t.copy_(other + 3)  # as the message says
    assert t.tolist() == [[3.0] * 4] * 4
    t.add_(1)
    assert t.tolist() == [[4.0] * 4] * 4


def test_a_write_that_failed_half_way_is_lost(mesh: dtorch.DeviceMesh) -> None:
    t = dtorch.zeros(8, device_mesh=mesh)
    t.index_add_(0, dtorch.tensor([0, 99], device_mesh=mesh), dtorch.ones(2, device_mesh=mesh))
    with pytest.raises((IndexError, RuntimeError)) as caught:
        t.to_torch()
    assert isinstance(caught.value, dtorch.RemoteError)
    dtorch.clear_errors()
    with pytest.raises(dtorch.TensorLostError):
        t.to_torch()
    t.zero_()
    assert t.sum().item() == 0


def test_a_bad_batch_costs_a_step_and_not_the_model(mesh: dtorch.DeviceMesh) -> None:
    with dtorch.device_mesh(mesh):
        model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 4))
    # Weight decay does not depend on the batch, and is done.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)

    def step(rows: list[int]) -> torch.Tensor:
        optimizer.zero_grad()
        x = dtorch.distribute_tensor(torch.tensor(rows), mesh, [Shard(0)])
        loss = model(x).square().mean().redistribute(placements=[Replicate()])
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = [step([1, 2, 3, 4]).item() for _ in range(3)]
    before = [p.to_torch() for p in model.parameters()]
    bad = step([1, 2, 3, 99])
    behind = step([1, 2, 3, 4])  # already issued
    for loss in (bad, behind):
        with pytest.raises(IndexError):
            loss.item()
    dtorch.clear_errors()
    for p, old in zip(model.parameters(), before, strict=True):
        assert p.to_torch().equal(old)
        assert p.to_local(1).equal(old)
    losses += [step([1, 2, 3, 4]).item() for _ in range(3)]
    assert losses[-1] < losses[0]


def test_a_failed_draw_leaves_the_generators_alike(mesh: dtorch.DeviceMesh) -> None:
    dtorch.manual_seed(1)
    torch.nn.functional.dropout(bad_rows(mesh))  # drawn on rank 0, failed on rank 1
    noise = dtorch.rand(8, device_mesh=mesh)
    assert noise.to_local(0).equal(noise.to_local(1))


# -- nobody asks ----------------------------------------------------------------------------------------------------


def run_script(body: str, *, timeout: float = 60, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)],
        capture_output=True,
        text=True,
        timeout=timeout,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def test_failures_nobody_asked_for_are_summed_up_once() -> None:
    done = run_script("""
        import torch, dtorch
        mesh = dtorch.init_device_mesh("cpu", (2,))
        weight = dtorch.ones(8, 4, device_mesh=mesh)
        rows = dtorch.tensor([0, 99], device_mesh=mesh)          # fails on both ranks: one failure
        for _ in range(3):
            out = torch.nn.functional.embedding(rows, weight)
            out = out * 2
        asked = torch.nn.functional.embedding(rows, weight)
        try:
            asked.to_torch()
        except IndexError:
            print("asked")
    """)
    assert done.stdout == "asked\n"
    assert done.stderr.count("nobody asked for") == 1
    assert re.search(r"3 failed operations .* IndexError: index out of range in self, in embedding\(", done.stderr)
    assert "issued at <string>:7 in <module>" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_failure_in_the_last_line_is_told_too() -> None:
    done = run_script("""
        import torch, dtorch
        out = torch.nn.functional.embedding(dtorch.tensor([7]), dtorch.randn(3, 2))
    """)
    assert "1 failed operation whose value nobody asked for" in done.stderr
    assert "issued at <string>:3 in <module>" in done.stderr


# -- an executor dies -----------------------------------------------------------------------------------------------


def stuck_on(mesh: dtorch.DeviceMesh) -> dtorch.Tensor:
    """float32[4], Shard(0), of which rank 1 will not make its part; rank 1 is at it by the time this returns."""
    read, write = os.pipe()
    path = f"/proc/{os.getpid()}/fd/{write}"

    def spin(rank: int) -> torch.Tensor:
        if rank == 1:
            print("about to be shot", file=sys.stderr, flush=True)
            with open(path, "w") as started:
                started.write("!")
            time.sleep(30)
        return torch.ones(2)

    stuck = dtorch.from_local(spin, mesh, [Shard(0)], shape=(4,))
    assert os.read(read, 1) == b"!"
    os.close(read)
    os.close(write)
    return stuck


def test_a_killed_executor(breaks_the_pool: None, mesh: dtorch.DeviceMesh) -> None:
    good = dtorch.ones(2, device_mesh=mesh)
    assert good.sum().item() == 2
    stuck = stuck_on(mesh)
    # Rank 0 waits for rank 1 in a collective; futures and a thread wait for both.
    futures = [(stuck.redistribute(placements=[Replicate()]) * k).to_torch_async() for k in range(20)]
    outcome: list[BaseException] = []

    def wait() -> None:
        try:
            stuck.sum().item()
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.3)
    pids = client().pool.pids
    began = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    for future in futures:
        with pytest.raises(dtorch.ExecutorDiedError) as caught:
            future.get(timeout=5)
    thread.join(5)
    took = time.monotonic() - began
    assert took < 1, took
    assert len(outcome) == 1 and isinstance(outcome[0], dtorch.ExecutorDiedError)
    text = str(caught.value)
    assert f"pid {pids[1]}" in text and "SIGKILL" in text and "about to be shot" in text and "restart()" in text
    uses: list[Callable[[], Any]] = [lambda: good + 1, good.to_torch, lambda: dtorch.ones(2), good.relu]
    for use in (*uses, lambda: good.redistribute(placements=[Shard(0)])):
        with pytest.raises((dtorch.ExecutorDiedError, dtorch.TensorLostError)):
            use()
    dtorch.restart()
    assert not Path(f"/proc/{pids[0]}").exists()
    new = dtorch.arange(4, device_mesh=mesh)
    assert new.sum().item() == 6
    for use in (good.to_torch, lambda: good + 1, lambda: (good + new[:2]).to_torch(), good.item, lambda: repr(good)):
        with pytest.raises((dtorch.TensorLostError, RuntimeError)) as lost:
            use()
        assert isinstance(lost.value, dtorch.TensorLostError) or "Scalar" in str(lost.value)
    # Also where the call has a plan already.
    a = dtorch.ones(2, device_mesh=mesh)
    a + a
    with pytest.raises(dtorch.TensorLostError):
        (a + good).to_torch()
    a.redistribute(placements=[Shard(0)])
    with pytest.raises(dtorch.TensorLostError):
        good.redistribute(placements=[Shard(0)]).redistribute(placements=[Replicate()]).to_torch()
    assert a.redistribute(placements=[Shard(0)]).redistribute(placements=[Replicate()]).tolist() == [1, 1]
    with pytest.raises(dtorch.ExecutorDiedError):
        futures[0].get()


def test_awaiting_an_executor_that_dies(breaks_the_pool: None, mesh: dtorch.DeviceMesh) -> None:
    stuck = stuck_on(mesh)

    async def one() -> BaseException:
        try:
            await stuck
        except dtorch.ExecutorDiedError as error:
            return error
        raise AssertionError("it did not raise")

    async def main() -> float:
        tasks = [asyncio.create_task(one()) for _ in range(50)]
        await asyncio.sleep(0.2)
        began = time.monotonic()
        os.kill(client().pool.pids[0], signal.SIGKILL)
        await asyncio.wait_for(asyncio.gather(*tasks), 5)
        return time.monotonic() - began

    assert asyncio.run(main()) < 1


def test_a_closed_pool_says_so_and_the_next_use_starts_another(mesh: dtorch.DeviceMesh) -> None:
    t = dtorch.ones(2, device_mesh=mesh)
    future = t.to_torch_async()
    assert future.get().tolist() == [1, 1]
    late = stuck_on(mesh).to_torch_async()
    dtorch.shutdown()
    with pytest.raises(dtorch.PoolError, match="shut down"):
        late.get(timeout=5)
    with pytest.raises(dtorch.TensorLostError):
        t.to_torch()
    assert dtorch.ones(2, device_mesh=mesh).sum().item() == 2


def test_a_pool_that_cannot_start_says_why(breaks_the_pool: None) -> None:
    dtorch.shutdown()
    dtorch.configure(start_timeout=0.01)
    try:
        t = dtorch.ones(2)  # nothing waits yet
        with pytest.raises(dtorch.PoolError, match=r"has not started within 0\.01 s: .*start_timeout=600"):
            t.to_torch()
        with pytest.raises(dtorch.PoolError, match=r"has not started within 0\.01 s"):
            t + 1
    finally:
        dtorch.configure(start_timeout=120.0)


# -- the client -----------------------------------------------------------------------------------------------------


def test_ctrl_c_is_one_keyboard_interrupt_and_harms_nothing() -> None:
    done = run_script("""
        import os, signal, threading, time
        import torch, dtorch
        mesh = dtorch.init_device_mesh("cpu", (2,))
        good = dtorch.ones(2, device_mesh=mesh)
        good.tolist()
        def slow(rank):
            time.sleep(2)
            return torch.ones(2)
        stuck = dtorch.from_local(slow, mesh, [dtorch.Shard(0)], shape=(4,))
        threading.Timer(0.3, lambda: os.killpg(0, signal.SIGINT)).start()
        began = time.monotonic()
        try:
            stuck.to_torch()
        except KeyboardInterrupt:
            print("interrupted", time.monotonic() - began < 1)
        print(stuck.sum().item(), (good * 2).tolist())
    """)
    assert done.stdout == "interrupted True\n4.0 [2.0, 2.0]\n" and done.stderr == ""


def state_of(pid: int) -> str:
    """The state of a process; empty once it has ended, whether or not somebody has asked how."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if state in "ZX" else state


def test_a_killed_client_leaves_nothing() -> None:
    body = """
        import os, time
        import torch, dtorch
        mesh = dtorch.init_device_mesh("cpu", (2,))
        x = dtorch.randn(1024, 1024, device_mesh=mesh, placements=[dtorch.Shard(0)])
        big = x.to_torch()
        future = (x @ x.redistribute(placements=[dtorch.Replicate()])).to_torch_async()
        from dtorch.runtime.client import client
        print(client().pool.warden_pid, *client().pool.pids.values(), flush=True)
        time.sleep(30)
    """
    before = {p.name for p in (*Path("/dev/shm").iterdir(), *Path("/tmp").glob("dtorch*"))}
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(body)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None
        pids = [int(p) for p in process.stdout.readline().split()]
        assert len(pids) == 3
        process.kill()
        process.wait()
        deadline = time.monotonic() + 2
        while (left := [p for p in pids if state_of(p)]) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert not left, [state_of(p) for p in left]
    assert {p.name for p in (*Path("/dev/shm").iterdir(), *Path("/tmp").glob("dtorch*"))} <= before


def test_blocking_mode_fails_where_it_stands() -> None:
    done = run_script(
        """
        import torch, dtorch
        mesh = dtorch.init_device_mesh("cpu", (2,))
        weight = dtorch.ones(8, 4, device_mesh=mesh)
        rows = dtorch.distribute_tensor(torch.tensor([0, 1, 2, 99]), mesh, [dtorch.Shard(0)])
        try:
            torch.nn.functional.embedding(rows, weight)
        except IndexError as error:
            print("raised at the call,", error.site)
        def fails(rank):
            raise ValueError("no")
        for make in (lambda: dtorch.from_local(fails, mesh, [dtorch.Shard(0)], shape=(4,)),):
            try:
                make()
            except ValueError:
                print("from_local too")
        print((weight + 1).sum().item())
        """,
        DTORCH_BLOCKING="1",
    )
    assert done.stdout == "raised at the call, <string>:7 in <module>\nfrom_local too\n64.0\n"
    assert done.stderr == ""


def test_a_forked_child_never_touches_the_parents_pool() -> None:
    done = run_script("""
        import os, sys
        import torch, dtorch
        mesh = dtorch.init_device_mesh("cpu", (2,))
        old = dtorch.ones(4, device_mesh=mesh)
        pending = (old + 1).to_torch_async()
        (old + old).tolist()
        pid = os.fork()
        if pid == 0:
            for name, use in {
                "to_torch": old.to_torch, "add": lambda: old + old, "pending": pending.get, "repr": lambda: repr(old),
            }.items():
                try:
                    use()
                except dtorch.DtorchError as error:
                    print(name, type(error).__name__)
            new = dtorch.ones(4, device_mesh=mesh) * 5
            print("own pool", new.sum().item())
            try:
                (new + old).to_torch()
            except dtorch.TensorLostError as error:
                print("mixed", "parent" in str(error))
            dtorch.shutdown()
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(pid, 0)
        print("parent", pending.get().tolist(), (old * 3).tolist(), flush=True)
    """)
    assert done.stdout.splitlines() == [
        "to_torch TensorLostError",
        "add TensorLostError",
        "pending PoolError",
        "repr TensorLostError",
        "own pool 20.0",
        "mixed True",
        "parent [2.0, 2.0, 2.0, 2.0] [3.0, 3.0, 3.0, 3.0]",
    ]


# -- bounds ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_bounds() -> Iterator[None]:
    dtorch.shutdown()
    dtorch.configure(run_ahead_soft=100, run_ahead_hard=400)
    yield
    dtorch.shutdown()
    dtorch.configure(run_ahead_soft=50_000, run_ahead_hard=1_000_000)


def test_run_ahead_is_bounded(small_bounds: None) -> None:
    x = dtorch.ones(4)
    assert x.sum().item() == 4
    writer, pid = client().writer, client().pool.pids[0]
    done = threading.Event()
    results: list[Any] = []

    def issue() -> None:
        y = x
        for _ in range(1000):
            y = y + 1
        results.append(y)
        done.set()

    os.kill(pid, signal.SIGSTOP)
    try:
        thread = threading.Thread(target=issue)
        thread.start()
        assert not done.wait(0.3)  # past the hard bound a call waits
        assert 300 <= writer.behind() <= 402

        async def in_a_loop() -> None:
            y = x
            with pytest.raises(dtorch.RunAheadError, match=r"await t\.ready\(\)"):
                for _ in range(1000):
                    y = y + 1

        asyncio.run(in_a_loop())
    finally:
        os.kill(pid, signal.SIGCONT)
    assert done.wait(10)
    thread.join()
    assert results[0].tolist() == [1001.0] * 4


def test_awaits_pause_past_the_soft_bound(small_bounds: None) -> None:
    x = dtorch.ones(4)
    first = x.to_torch_async()
    first.wait()
    pid = client().pool.pids[0]

    async def main() -> tuple[bool, float]:
        os.kill(pid, signal.SIGSTOP)
        try:
            y = x
            for _ in range(150):
                y = y + 1
            task = asyncio.ensure_future(asyncio.wait_for(_value(first), 5))
            await asyncio.sleep(0.2)
            paused = not task.done()
        finally:
            os.kill(pid, signal.SIGCONT)
        await task
        return paused, (await y)[0].item()

    assert asyncio.run(main()) == (True, 151.0)


async def _value(future: Any) -> Any:
    return await future


def test_a_million_commands_hold_steady_memory() -> None:
    """A tenth of that; the ring goes around, refs come back."""
    x = dtorch.ones(4)

    def resident() -> int:
        pids = [os.getpid(), client().pool.pids[0]]
        return sum(int(Path(f"/proc/{p}/statm").read_text().split()[1]) * 4096 for p in pids)

    def run(n: int) -> None:
        y = x
        for _ in range(n):
            y = y + 1
        y.sum().item()

    run(20_000)
    before = resident()
    run(30_000)
    assert resident() - before < 16 << 20


# -- the watchdog ---------------------------------------------------------------------------------------------------


def test_the_watchdog_names_the_operator() -> None:
    done = run_script(
        """
        import os, signal, time
        import torch, dtorch
        from dtorch.runtime.client import client
        x = dtorch.randn(16, 16)
        kept = torch.linalg.svd(x)
        kept[1].tolist()
        time.sleep(0.2)
        pid = client().pool.pids[0]
        os.kill(pid, signal.SIGSTOP)
        more = torch.linalg.svd(x)
        time.sleep(1)
        os.kill(pid, signal.SIGCONT)
        """,
        DTORCH_WATCHDOG="0.3",
    )
    wanted = r"dtorch: executor 0 \(pid \d+\) has been in \w*svd\(A float32\[16, 16\]"
    assert re.search(wanted, done.stderr), done.stderr
