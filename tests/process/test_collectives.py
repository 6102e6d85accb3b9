"""Collectives between real processes, through shared memory and through gloo."""

from __future__ import annotations

import glob
import mmap
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dtorch.executor import redistribution
from dtorch.executor.collectives import Comm, GlooGroup
from dtorch.executor.device import DeviceError
from dtorch.executor.redistribution import run, run_many
from dtorch.executor.shm_collectives import Aborted
from dtorch.mesh import init_device_mesh
from dtorch.placement import Partial, Placement, Replicate, Shard
from dtorch.runtime.shared import ABORT
from dtorch.sharding.redistribute import Redistribution, plan_redistribute
from dtorch.spec import TensorSpec

R, P, S = Replicate(), Partial(), Shard
SLOT = 1 << 16


class Pool:
    """Runs one function in `n` forked processes and hands back what each returns."""

    def __init__(self, n: int, mode: str = "shm") -> None:
        self.n, self.mode = n, mode
        self.fd = os.memfd_create("collective")
        self.control_fd = os.memfd_create("control")
        os.ftruncate(self.control_fd, 4096)
        self.regions: dict[tuple[int, ...], int] = {}
        self.pids: list[int] = []

    def plan(self, src: TensorSpec, *dst: Placement) -> Redistribution:
        def region(members: tuple[int, ...]) -> int:
            return self.regions.setdefault(members, len(self.regions))

        return plan_redistribute(src, src.with_placements(dst), lambda mesh, r: mesh.ids[r], region, SLOT)

    def start(self, function: Callable[[int, Comm, Any], object]) -> list[int]:
        """Fork; returns a pipe per process."""
        pipes = []
        for me in range(self.n):
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                try:
                    torch.set_num_threads(1)
                    control = _map(self.control_fd)
                    state = SimpleNamespace(control=control, collective_fd=self.fd, max_executors=8)
                    with torch.inference_mode():
                        answer = function(me, Comm(state, me, self.mode, SLOT), control)
                except BaseException:
                    answer = AssertionError(traceback.format_exc())
                with os.fdopen(writing, "wb") as f:
                    pickle.dump(answer, f)
                os._exit(0)
            os.close(writing)
            pipes.append(reading)
            self.pids.append(pid)
        return pipes

    def finish(self, pipes: list[int]) -> list[Any]:
        answers = []
        for reading in pipes:
            with os.fdopen(reading, "rb") as f:
                data = f.read()
            answers.append(pickle.loads(data) if data else None)
        for answer in answers:
            if isinstance(answer, AssertionError):
                raise answer
        return answers

    def close(self) -> None:
        for pid in self.pids:
            try:
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    time.sleep(0.2)
                    if os.waitpid(pid, os.WNOHANG)[0] == 0:
                        os.kill(pid, signal.SIGKILL)
                        os.waitpid(pid, 0)
            except ChildProcessError:
                pass
        os.close(self.fd)
        os.close(self.control_fd)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _map(fd: int) -> memoryview:
    return memoryview(mmap.mmap(fd, 4096)).cast("Q")


def value(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def moves(n: int) -> list[tuple[TensorSpec, Placement]]:
    """Small ones, ones of several rounds, uneven and empty shards."""
    mesh = init_device_mesh("cpu", n)
    pairs = [(P, R), (P, S(0)), (P, S(1)), (S(0), R), (S(1), R), (S(0), S(1)), (S(1), S(0)), (Partial("max"), R)]
    shapes = [(2, 2), (n + 1, 5), (300, 401)]
    return [(TensorSpec.of(shape, None, torch.float32, mesh, (a,)), b) for shape in shapes for a, b in pairs]


@pytest.mark.parametrize("mode", ["shm", "gloo"])
@pytest.mark.parametrize("n", [2, 4])
def test_every_collective(n: int, mode: str) -> None:
    cases = moves(n)
    with Pool(n, mode) as pool:
        plans = [pool.plan(src, dst) for src, dst in cases]

        def work(me: int, comm: Comm, control: memoryview) -> list[torch.Tensor]:
            out = []
            for i, plan in enumerate(plans):
                local = value(plan.src.shape, 100 * i + me) if plan.src.is_partial else value(plan.src.shape, i)
                for d, (start, length) in enumerate(plan.src.region(me)):
                    local = local.narrow(d, start, length)
                for _ in range(3):  # both parities
                    outs, failure = run(plan.programs[me], [local], comm)
                    assert failure is False
                out.append(outs[0].numpy())
            return out

        answers = pool.finish(pool.start(work))
    for i, plan in enumerate(plans):
        if plan.src.is_partial:
            whole = value(plan.src.shape, 100 * i)
            for r in range(1, n):
                term = value(plan.src.shape, 100 * i + r)
                whole = torch.maximum(whole, term) if plan.src.placements == (Partial("max"),) else whole + term
        else:
            whole = value(plan.src.shape, i)
        for r in range(n):
            expected = whole
            for d, (start, length) in enumerate(plan.dst.region(r)):
                expected = expected.narrow(d, start, length)
            assert torch.equal(torch.from_numpy(answers[r][i]), expected), plan


@pytest.mark.parametrize("mode", ["shm", "gloo"])
def test_poison_never_lost_nor_invented(mode: str) -> None:
    """Which member fails, and when, is drawn at random; every member must see each failure, and only those."""
    n, rounds = 3, 3000 if mode == "shm" else 200
    mesh = init_device_mesh("cpu", n)
    with Pool(n, mode) as pool:
        plans = [
            pool.plan(TensorSpec.of(shape, None, torch.float32, mesh, (a,)), b)
            for shape in ((6,), (30_000,))
            for a, b in ((P, R), (P, S(0)), (S(0), R))
        ]

        def work(me: int, comm: Comm, control: memoryview) -> list[bool]:
            seen = []
            draw = torch.Generator().manual_seed(7)
            kinds = torch.randint(0, len(plans) * 20, (rounds,), generator=draw).tolist()
            failing = torch.randint(0, 5 * n, (rounds,), generator=draw).tolist()
            for kind, bad in zip(kinds, failing, strict=True):
                # Large ones are rare: it is the small ones that race.
                plan = plans[kind if kind < len(plans) else kind % 3]
                local = torch.ones(plan.src.local_shape(me))
                outs, failure = run(plan.programs[me], [local], comm, poison=bad == me)
                seen.append(bool(failure))
                if not failure:
                    assert outs[0].eq(n if plan.src.is_partial else 1).all()
            return [seen, [bad < n for bad in failing]]

        for seen, expected in pool.finish(pool.start(work)):
            assert seen == expected


@pytest.mark.parametrize(
    ("mode", "holder", "name", "fails"),
    [
        ("shm", redistribution, "make_ready", False),  # then the general way does it
        ("shm", redistribution, "_empty", True),
        ("gloo", redistribution, "_empty", True),
        ("gloo", GlooGroup, "_packed", True),
    ],
)
def test_a_member_without_memory_says_so_before_it_arrives(mode: str, holder: Any, name: str, fails: bool) -> None:
    mesh = init_device_mesh("cpu", 2)
    with Pool(2, mode) as pool:
        # Too large for the fast path, of which nothing is asked here but that it may not be there.
        plan = pool.plan(TensorSpec.of((600_000,), None, torch.float32, mesh, (S(0),)), R)
        local = torch.ones(300_000)

        def work(me: int, comm: Comm, control: memoryview) -> list[str]:
            def refuse(*_: Any) -> Any:
                raise MemoryError("none left")

            seen = []
            for attempt in range(3):
                kept = vars(holder)[name]
                if me == 1 and attempt == 1:
                    setattr(holder, name, refuse)
                if attempt == 1:
                    comm.ready.clear()
                outs, failure = run(plan.programs[me], [local], comm)
                setattr(holder, name, kept)
                seen.append(repr(failure) if failure else str(outs[0].sum().item()))
            return seen

        answers = pool.finish(pool.start(work))
    for answer, failure in zip(answers, ["True", "MemoryError('none left')"], strict=True):
        assert answer == ["600000.0", failure if fails else "600000.0", "600000.0"]


def test_a_transfer_that_fails_after_arrival_ends_the_executor() -> None:
    """Its peers wait for bytes then, and no word in shared memory can tell them; the end of the pool does."""
    mesh = init_device_mesh("cpu", 2)
    with Pool(2, "gloo") as pool:
        plan = pool.plan(TensorSpec.of((6,), None, torch.float32, mesh, (S(0),)), R)

        def work(me: int, comm: Comm, control: memoryview) -> str:
            run(plan.programs[me], [torch.ones(3)], comm)
            if me == 1:
                GlooGroup._all_to_all = lambda *_: [][0]  # type: ignore[method-assign]
            try:
                run(plan.programs[me], [torch.ones(3)], comm)
            except DeviceError as error:
                control[ABORT] = 1  # as the warden does when the process has ended
                return str(error)
            except Aborted:
                return "freed"
            return "nothing happened"

        answers = pool.finish(pool.start(work))
    assert answers == ["freed", "gloo, between executors (0, 1): list index out of range"]


def test_a_broken_connection_waits_for_the_word_of_a_death() -> None:
    """Else it would pass for an error of the command, where the executor has died."""
    mesh = init_device_mesh("cpu", 2)
    with Pool(2, "gloo") as pool:
        plan = pool.plan(TensorSpec.of((6,), None, torch.float32, mesh, (S(0),)), R)
        group: Any = plan.programs[0].steps[0].group  # type: ignore[union-attr]

        def work(me: int, comm: Comm, control: memoryview) -> Any:
            run(plan.programs[me], [torch.ones(3)], comm)
            if me == 0:
                # It has arrived, and sends nothing.
                comm.shared(*group).barrier()
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                run(plan.programs[me], [torch.ones(3)], comm)
            except Aborted as error:
                return control[ABORT], str(error)
            return "nothing happened"

        pipes = pool.start(work)
        os.waitpid(pool.pids[0], 0)
        time.sleep(0.3)
        _map(pool.control_fd)[ABORT] = 1
        told, text = pool.finish(pipes)[1]
    assert told == 1 and "collective of executors (0, 1)" in text


@pytest.mark.parametrize("size", [4, 1_000_000])
def test_a_death_frees_the_peers(size: int) -> None:
    """Peers wait for a member that was killed; the abort word alone, with nobody waking them, sets them free."""
    n = 3
    mesh = init_device_mesh("cpu", n)
    with Pool(n) as pool:
        plan = pool.plan(TensorSpec.of((size,), None, torch.float32, mesh, (P,)), R)

        def work(me: int, comm: Comm, control: memoryview) -> float:
            run(plan.programs[me], [torch.ones(size)], comm)
            if me == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            with pytest.raises(Aborted, match="a peer of executor"):
                run(plan.programs[me], [torch.ones(size)], comm)
            return time.monotonic()

        pipes = pool.start(work)
        os.waitpid(pool.pids[1], 0)
        time.sleep(0.1)
        aborted = time.monotonic()
        _map(pool.control_fd)[ABORT] = 1
        answers = pool.finish(pipes)
        assert answers[1] is None
        assert max(answers[0], answers[2]) - aborted < 0.5


def test_waiting_does_not_spin() -> None:
    with Pool(2) as pool:

        def work(me: int, comm: Comm, control: memoryview) -> float:
            group = comm.group((0, 1), 0)
            group.barrier()
            if me:
                time.sleep(0.5)
            before = time.process_time()
            group.barrier()
            return time.process_time() - before

        assert pool.finish(pool.start(work))[0] < 0.1


@pytest.mark.parametrize("length", [0, 1, 5000, SLOT + 1, 3 * SLOT])
@pytest.mark.parametrize("mode", ["shm", "gloo"])
def test_broadcast_bytes(mode: str, length: int) -> None:
    data = bytes(i % 251 for i in range(length))
    with Pool(3, mode) as pool:

        def work(me: int, comm: Comm, control: memoryview) -> list[bool]:
            group = comm.group((0, 1, 2), 0)
            return [group.broadcast_bytes(root, data if me == root else None) == data for root in (0, 2, 1)]

        assert pool.finish(pool.start(work)) == [[True, True, True]] * 3


def test_groups_overlap() -> None:
    """Rows and columns of a mesh in turn, each with words and slots of its own; many at once as one."""
    mesh = init_device_mesh("cpu", (2, 2))
    with Pool(4) as pool:
        plans = [
            pool.plan(TensorSpec.of((4, 6), None, torch.float32, mesh, src), *dst)
            for src, dst in [((P, R), (R, R)), ((R, P), (R, R)), ((S(0), R), (R, R)), ((P, P), (R, R))]
        ]
        assert {p.groups[0].members for p in plans[0].programs.values()} == {(0, 2), (1, 3)}
        assert {p.groups[0].members for p in plans[1].programs.values()} == {(0, 1), (2, 3)}

        def work(me: int, comm: Comm, control: memoryview) -> list[list[float]]:
            sums = []
            for turn in range(50):
                x = [[torch.full(p.src.local_shape(me), float(me + turn))] for p in plans]
                results, failure = run_many([p.programs[me] for p in plans], x, comm)
                assert failure is False
                sums.append([outs[0].sum().item() for outs in results])
            return sums

        answers = pool.finish(pool.start(work))
    for me, sums in enumerate(answers):
        i, j = divmod(me, 2)
        column, row = (j, 2 + j), (2 * i, 2 * i + 1)
        for turn, got in enumerate(sums):
            assert got == [
                24 * sum(r + turn for r in column),
                24 * sum(r + turn for r in row),
                12 * sum(r + turn for r in column),
                24 * sum(r + turn for r in range(4)),
            ]


def test_gloo_leaves_no_files() -> None:
    before = set(glob.glob(os.path.join(tempfile.gettempdir(), "dtorch-*")))
    mesh = init_device_mesh("cpu", 2)
    with Pool(2, "gloo") as pool:
        plan = pool.plan(TensorSpec.of((4,), None, torch.float32, mesh, (P,)), R)

        def work(me: int, comm: Comm, control: memoryview) -> list[str]:
            run(plan.programs[me], [torch.ones(4)], comm)
            comm.group((0, 1), 0).barrier()
            return glob.glob(os.path.join(tempfile.gettempdir(), "dtorch-*"))

        for left in pool.finish(pool.start(work)):
            assert set(left) <= before


def test_a_group_of_one_shares_nothing() -> None:
    comm = Comm(SimpleNamespace(control=memoryview(bytearray(512)).cast("Q"), collective_fd=-1, max_executors=8), 3)
    group = comm.group((3,), 0)
    assert (group.barrier(), group.barrier(1), group.broadcast_bytes(0, b"abc")) == (0, 1, b"abc")


def test_unknown_mode() -> None:
    with pytest.raises(ValueError, match='write "shm" or "gloo"'):
        Comm(SimpleNamespace(control=memoryview(bytearray(512)).cast("Q"), collective_fd=-1, max_executors=8), 0, "mpi")
