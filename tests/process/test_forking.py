"""Processes around the client: children that it forks, starts and runs in, and those that executors start."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from .clients import TWO, USE, run, running

FORK = TWO + "\nold = dtorch.ones(4, device_mesh=mesh)\nold.tolist()\n"


def test_a_child_that_ends_like_a_script_harms_nothing() -> None:
    """It drops tensors, runs its exit handlers, and closes what it takes for the pool."""
    ended = run(
        FORK
        + """
import gc
pending = (old + 3).to_torch_async()
for end in ("sys.exit(0)", "dtorch.shutdown(); sys.exit(0)", "raise SystemExit", "del old; gc.collect(); sys.exit(0)"):
    before = set(pids())
    pid = os.fork()
    if pid == 0:
        globals().pop("pending", None)
        exec(end)
    assert os.waitpid(pid, 0)[1] == 0, end
    assert set(pids()) == before and len(client().pool.alive) == 2
    print((old * 2).tolist(), flush=True)
print(pending.get().tolist())
"""
    )
    assert ended.out == "[2.0, 2.0, 2.0, 2.0]\n" * 4 + "[4.0, 4.0, 4.0, 4.0]\n", ended.err
    assert (ended.status, ended.err, ended.left) == (0, "", [])


def test_a_fork_of_a_fork_and_workers_of_a_preloaded_server() -> None:
    """Each has a pool of its own, which ends with it; nobody touches another's."""
    ended = run(
        FORK
        + """
def worker(name, k):
    try:
        old + 1
    except dtorch.TensorLostError:
        new = dtorch.ones(2, device_mesh=mesh) * k
        print(name, new.tolist(), flush=True)
        return new
pid = os.fork()
if pid == 0:
    new = worker("child", 5)
    pid = os.fork()
    if pid == 0:
        try:
            new + 1
        except dtorch.TensorLostError:
            worker("grandchild", 6)
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    print("child", (new + 1).tolist(), flush=True)
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
workers = []
for i in range(2):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        worker(f"worker {i}", i)
        os.write(write, b"up")
        time.sleep(60)
    os.close(write)
    os.read(read, 2)
    workers.append(pid)
for pid in workers:
    os.kill(pid, signal.SIGTERM)
assert [os.waitpid(pid, 0)[1] for pid in workers] == [0, 0]
print("parent", (old * 2).tolist())
"""
    )
    assert ended.out.splitlines() == [
        "child [5.0, 5.0]",
        "grandchild [6.0, 6.0]",
        "child [6.0, 6.0]",
        "worker 0 [0.0, 0.0]",
        "worker 1 [1.0, 1.0]",
        "parent [2.0, 2.0, 2.0, 2.0]",
    ], ended.err
    assert (ended.status, ended.err, ended.left) == (0, "", [])


def test_a_fork_while_the_pool_starts() -> None:
    ended = run(
        """
        import os, dtorch
        mesh = dtorch.init_device_mesh("cpu", (2,))
        pid = os.fork()
        print((dtorch.ones(2, device_mesh=mesh) + 1).tolist(), flush=True)
        if pid:
            print(os.waitpid(pid, 0)[1])
        """
    )
    assert ended.out == "[2.0, 2.0]\n[2.0, 2.0]\n0\n", ended.err
    assert (ended.status, ended.left) == (0, [])


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(tmp_path: Path, method: str) -> None:
    """Daemonic children, whose end is not an interpreter's end, and a data loader's workers."""
    (tmp_path / "script.py").write_text(
        f"""
import multiprocessing, sys
import torch, dtorch
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return torch.full((2,), float(i))

def work(queue):
    queue.put((dtorch.ones(3) * 2).tolist())

if __name__ == "__main__":
    mesh = dtorch.init_device_mesh("cpu", (2,))
    x = dtorch.ones(2, device_mesh=mesh)
    print(x.tolist())
    context = multiprocessing.get_context({method!r})
    queue = context.Queue()
    child = context.Process(target=work, args=(queue,), daemon=True)
    child.start()
    print(queue.get(timeout=60))
    child.join()
    print(child.exitcode, (x + 1).tolist())
    total = 0
    for batch in DataLoader(Rows(), batch_size=4, num_workers=1, multiprocessing_context={method!r}):
        total += (dtorch.distribute_tensor(batch, mesh, [dtorch.Shard(0)]) * x).sum().item()
    print(total)
"""
    )
    ended = run(command=[sys.executable, tmp_path / "script.py"], timeout=100)
    assert ended.out == "[1.0, 1.0]\n[2.0, 2.0, 2.0]\n0 [2.0, 2.0]\n56.0\n", ended.err
    assert (ended.status, ended.err, ended.left) == (0, "", [])


def test_a_data_loader_whose_rows_are_dtorch_tensors_of_the_parent() -> None:
    """The error of the worker says what to do."""
    ended = run(
        FORK
        + """
from torch.utils.data import DataLoader
class Rows:
    def __len__(self): return 2
    def __getitem__(self, i): return old + i
try:
    next(iter(DataLoader(Rows(), num_workers=1)))
except dtorch.TensorLostError as error:
    print("in a forked process, it is the parent's" in str(error))
print((old + 1).tolist())
"""
    )
    assert ended.out == "True\n[2.0, 2.0, 2.0, 2.0]\n", ended.err
    assert (ended.status, ended.left) == (0, [])


# -- nested -----------------------------------------------------------------------------------------------------------


def test_clients_inside_clients() -> None:
    """A function on an executor may start a program that uses dtorch, but has no dtorch of its own."""
    ended = run(
        TWO
        + """
def outer(rank):
    done = subprocess.run([sys.executable, "-c", "import dtorch; print((dtorch.ones(2) * 3).sum().item())"],
                          capture_output=True, text=True, check=True)
    return torch.tensor([float(done.stdout)])
print(dtorch.from_local(outer, mesh, [dtorch.Shard(0)], shape=(2,)).tolist())
def inner(rank):
    import dtorch
    return dtorch.ones(1)
try:
    dtorch.from_local(inner, mesh, [dtorch.Shard(0)], shape=(2,)).tolist()
except dtorch.PoolError as error:
    print("this code runs on an executor" in str(error))
print(value())
"""
    )
    assert ended.out == "[6.0, 6.0]\nTrue\n4.0\n", ended.err
    assert (ended.status, ended.left) == (0, [])


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("return torch.ones(1)", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no more')", 1, "no more"),
        ("raise ValueError('odd')", 1, "ValueError: odd"),
    ],
)
def test_a_child_that_an_executor_forks_is_no_executor(end: str, status: int, said: str) -> None:
    """It ends where the function does; it never reads the ring, nor answers for its parent, nor outlives the pool."""
    ended = run(
        TWO
        + f"""
def forks(rank):
    pid = os.fork()
    if pid == 0:
        {end}
    return torch.tensor([float(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))])
print(dtorch.from_local(forks, mesh, [dtorch.Shard(0)], shape=(2,)).tolist())
@torch.library.custom_op("forks::forks", mutates_args=())
def forks_too(x: torch.Tensor) -> torch.Tensor:
    pid = os.fork()
    if pid == 0:
        {end.replace("torch.ones(1)", "x + 1")}
    return x + os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
forks_too.register_fake(torch.empty_like)
print(forks_too(dtorch.ones(2, device_mesh=mesh)).tolist())
print(value())
"""
    )
    assert ended.out == f"[{status}.0, {status}.0]\n[{status + 1}.0, {status + 1}.0]\n4.0\n", ended.err
    assert (ended.status, ended.left) == (0, [])
    assert ended.err.count(said) >= 4 if said else ended.err == ""


def test_exec_ends_the_pool() -> None:
    """The process lives on, as another program; its executors do not."""
    with running(TWO + "print(*pids(), flush=True)\nos.execv('/bin/sleep', ['sleep', '60'])") as client:
        assert len(client.line().split()) == 3
        assert client.gone() == []
        assert client.process.poll() is None
        assert Path(f"/proc/{client.process.pid}/comm").read_text() == "sleep\n"


def test_a_daemon(tmp_path: Path) -> None:
    """Forked twice, with a session of its own, no directory, no umask and no descriptor, before dtorch is imported."""
    said = tmp_path / "said"
    with running(
        f"""
        import os
        if os.fork():
            os._exit(0)
        os.setsid()
        if os.fork():
            os._exit(0)
        os.chdir("/")
        os.umask(0)
        os.closerange(0, 64)
        import dtorch
        mesh = dtorch.init_device_mesh("cpu", (2,))
        value = (dtorch.ones(4, device_mesh=mesh, placements=[dtorch.Shard(0)]) + 1).sum().item()
        with open({str(said)!r}, "w") as file:
            file.write(str(value))
        """
    ) as client:
        client.process.wait(20)
        # The daemon and its executors are no children of that process any more.
        deadline = time.monotonic() + 60
        while not said.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert client.gone() == []
    assert said.read_text() == "8.0"


def test_under_pytest_with_workers(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    body = "".join(f"    {line}\n" for line in USE.replace('"cpu", (2,)', '"cpu", (k,)').splitlines() if line)
    head = "import pytest\n@pytest.mark.parametrize('k', [1, 2])\ndef test_it(k):\n"
    (tmp_path / "test_it.py").write_text(f"{head}{body}    assert (x + 1).sum().item() == 8\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-n", "2", "-p", "no:cacheprovider", tmp_path]
    ended = run(command=command, timeout=100, cwd=tmp_path)
    assert "2 passed" in ended.out, ended.out + ended.err
    assert (ended.status, ended.left) == (0, [])
