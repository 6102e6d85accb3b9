"""Signals to a client with a pool: its handlers, its masks, Ctrl-C at any moment; threads; and all its ways to end."""

from __future__ import annotations

import os
import signal
import time

import pytest

from .clients import TWO, USE, run, running

# -- Ctrl-C -----------------------------------------------------------------------------------------------------------


def test_ctrl_c_in_sync_and_async_code_again_and_again() -> None:
    """One KeyboardInterrupt each, in whatever waits; the pool stands."""
    ended = run(
        TWO
        + """
import asyncio
def later(): threading.Timer(0.3, lambda: os.killpg(0, signal.SIGINT)).start()
async def main(t): await t
t = stuck(2)
for wait in (t.to_torch, lambda: asyncio.run(main(t)), lambda: asyncio.run(main(t))):
    later()
    try:
        wait()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
print(t.sum().item(), value(), len(client().pool.alive))
"""
    )
    assert ended.out == "interrupted\n" * 3 + "4.0 4.0 2\n", ended.err
    assert (ended.status, ended.err, ended.left) == (0, "", [])


@pytest.mark.parametrize("moment", ["importing", "starting", "waiting"])
def test_ctrl_c_while_it_starts(moment: str) -> None:
    """A program that does nothing about it ends as any program does: one traceback, the signal's status, no process."""
    code = {
        # The warden imports torch meanwhile, not the program: code of torch's swallows KeyboardInterrupts now and then.
        "importing": "import os, dtorch\ndtorch.Shard\nprint(flush=True)\nos.read(0, 1)",
        "starting": USE.replace("x =", "print(flush=True)\nx ="),
        "waiting": TWO + "t = stuck()\nprint(flush=True)\nt.to_torch()",
    }[moment]
    stdin, hold = os.pipe()
    with running(code, stdin=stdin) as client:
        client.line()
        time.sleep(0.2)
        os.killpg(client.process.pid, signal.SIGINT)
        began = time.monotonic()
        ended = client.end()
    os.close(stdin)
    os.close(hold)
    assert ended.status == -signal.SIGINT
    assert ended.err.count("KeyboardInterrupt") == 1, ended.err
    assert ended.left == []
    assert time.monotonic() - began < 10  # what was issued is not waited for


def test_ctrl_c_at_the_exit_ends_the_wait_quietly() -> None:
    """What was issued last gets a moment to run, and Ctrl-C takes it back. No traceback is made, nor a second one."""
    for before in ("", "threading.Timer(0.3, lambda: os.killpg(0, signal.SIGINT)).start()\nt.to_torch()\n"):
        with running(TWO + f"t = stuck()\nprint(flush=True)\n{before}") as client:
            client.line()
            if before:
                client.process.wait(20)
            else:
                time.sleep(0.4)
                os.killpg(client.process.pid, signal.SIGINT)
            ended = client.end()
        assert ended.left == []
        assert "ignored" not in ended.err
        assert ended.err.count("Traceback") == bool(before)
        assert ended.status == (-signal.SIGINT if before else 0)


def test_ctrl_c_ends_an_explicit_shutdown_and_the_pool_with_it() -> None:
    ended = run(
        TWO
        + """
t, before = stuck(), pids()
threading.Timer(0.3, lambda: os.killpg(0, signal.SIGINT)).start()
try:
    dtorch.shutdown()
except KeyboardInterrupt:
    print("interrupted", [p for p in before if os.path.exists(f"/proc/{p}")])
print(value())
"""
    )
    assert ended.out == "interrupted []\n4.0\n", ended.err
    assert (ended.status, ended.err, ended.left) == (0, "", [])


# -- other signals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM])
def test_signals_that_end_the_client(number: signal.Signals) -> None:
    """Sent to its whole group, in the middle of a wait."""
    ended = run(TWO + f"threading.Timer(0.2, lambda: os.killpg(0, {int(number)})).start()\nstuck().to_torch()")
    assert (ended.status, ended.out, ended.err, ended.left) == (-number, "", "", [])


def test_handlers_of_the_user_are_called_while_it_waits() -> None:
    """SIGPIPE is ignored, as Python does; SIGCHLD tells of the user's children, and of the pool's only at its end."""
    ended = run(
        TWO
        + """
got = []
numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD)
for number in numbers:
    signal.signal(number, lambda number, frame: got.append(signal.Signals(number).name))
t = stuck(1)
threading.Timer(0.2, lambda: [os.killpg(0, n) for n in (*numbers[:3], signal.SIGPIPE)]).start()
print(t.to_torch().tolist(), sorted(got))
got.clear()
subprocess.run(["true"])
print(got)
print(value(), len(client().pool.alive))
"""
    )
    assert ended.out == "[1.0, 1.0, 1.0, 1.0] ['SIGHUP', 'SIGTERM', 'SIGUSR1']\n['SIGCHLD']\n4.0 2\n", ended.err
    assert (ended.status, ended.err, ended.left) == (0, "", [])


def test_what_the_client_ignores_or_holds_back_is_its_own_affair() -> None:
    """A pool started so learns of a death as fast, and executors have no signal blocked."""
    ended = run(
        """
        import signal
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
        """.replace("        ", "")
        + TWO
        + """
for pid in pids():
    status = dict(line.split(":\\t") for line in open(f"/proc/{pid}/status").read().splitlines())
    assert int(status["SigBlk"], 16) == 0, status
    assert not int(status["SigIgn"], 16) & (1 << (signal.SIGCHLD - 1)), status
x = dtorch.ones(4, device_mesh=mesh, placements=[dtorch.Shard(0)])
os.kill(client().pool.pids[1], signal.SIGSTOP)
waits = x.redistribute(placements=[dtorch.Replicate()]).to_torch_async()
time.sleep(0.2)
os.kill(client().pool.pids[1], signal.SIGKILL)
began = time.monotonic()
try:
    waits.get(timeout=20)
except dtorch.ExecutorDiedError as error:
    print("SIGKILL" in str(error), time.monotonic() - began < 1)
dtorch.restart()
print(value())
"""
    )
    assert ended.out == "True True\n4.0\n", ended.err
    assert (ended.status, ended.left) == (0, [])


def test_a_handler_that_reaps_every_child() -> None:
    """It may take the warden's exit status: the pool does not make one up."""
    ended = run(
        TWO
        + """
def reap(*_):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
signal.signal(signal.SIGCHLD, reap)
dtorch.restart()
print(value())
os.kill(client().pool.warden_pid, signal.SIGKILL)
time.sleep(0.2)
try:
    value()
except dtorch.PoolError as error:
    print(str(error).partition(") ")[2].splitlines()[0])
"""
    )
    assert ended.out == (
        "4.0\nhas ended; how, this program's handler of SIGCHLD has learned, or nobody where it is ignored\n"
    ), ended.err
    assert (ended.status, ended.left) == (0, [])


def test_stopped_and_continued() -> None:
    """An executor, then the client itself, as job control does it."""
    with running(
        TWO
        + """
pid = client().pool.pids[1]
os.kill(pid, signal.SIGSTOP)
waits = (dtorch.ones(4, device_mesh=mesh, placements=[dtorch.Shard(0)]) + 1).to_torch_async()
try:
    waits.get(timeout=0.3)
except TimeoutError:
    print("timeout")
os.kill(pid, signal.SIGCONT)
print(waits.get(timeout=20).tolist(), flush=True)
t = stuck(0.5)
print("waits", flush=True)
print(t.to_torch().tolist())
"""
    ) as client:
        assert [client.line() for _ in range(3)] == ["timeout", "[2.0, 2.0, 2.0, 2.0]", "waits"]
        client.process.send_signal(signal.SIGSTOP)
        time.sleep(1)
        assert len(client.descendants()) == 3
        client.process.send_signal(signal.SIGCONT)
        ended = client.end()
    assert (ended.status, ended.out, ended.err, ended.left) == (0, "[1.0, 1.0, 1.0, 1.0]\n", "", [])


# -- threads ----------------------------------------------------------------------------------------------------------


def test_a_pool_outlives_the_thread_that_started_it_and_many_start_one() -> None:
    ended = run(
        """
        import os, threading
        import dtorch
        made, barrier = [], threading.Barrier(8)
        def start():
            barrier.wait()
            made.append(dtorch.ones(3) + 1)
            made[-1].tolist()
        threads = [threading.Thread(target=start) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print([t.sum().item() for t in made])
        tasks = [f"/proc/self/task/{t}/children" for t in os.listdir("/proc/self/task")]
        children = [child for task in tasks for child in open(task).read().split()]
        from dtorch.runtime.client import client
        print(children == [str(client().pool.warden_pid)], len(client().pool.alive))
        """
    )
    assert ended.out == f"{[6.0] * 8}\nTrue 1\n", ended.err
    assert (ended.status, ended.err, ended.left) == (0, "", [])


def test_the_program_ends_while_threads_wait() -> None:
    """One that may be left is told; one that may not is waited for."""
    ended = run(
        TWO
        + """
def waits():
    try:
        t.to_torch()
    except dtorch.PoolError as error:
        os.write(1, b"told: the pool was shut down\\n" if "shut down" in str(error) else str(error).encode())
t = stuck(30)
threading.Thread(target=waits, daemon=True).start()
time.sleep(0.3)
"""
    )
    assert (ended.status, ended.out, ended.left) == (0, "told: the pool was shut down\n", []), ended.err
    ended = run(TWO + "t = stuck(0.5)\nthreading.Thread(target=lambda: print(t.to_torch().tolist())).start()")
    assert (ended.status, ended.out, ended.err, ended.left) == (0, "[1.0, 1.0, 1.0, 1.0]\n", "", [])


# -- the end of the client --------------------------------------------------------------------------------------------

BUSY = """
gathered = stuck().redistribute(placements=[dtorch.Replicate()]).to_torch_async()   # one works, its peer waits for it
time.sleep(0.1)
"""
STOPPED = BUSY + "os.kill(client().pool.pids[1], signal.SIGSTOP)\n"


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("os.abort()", -signal.SIGABRT),
        ("import ctypes; ctypes.string_at(0)", -signal.SIGSEGV),
        ("os._exit(7)", 7),
        ("threading.Thread(target=lambda: sys.exit(3)).start()", 0),
        ("import atexit; atexit.register(lambda: 1 / 0)", 0),
        ("raise ValueError", 1),
        (BUSY, 0),
        (BUSY + "os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        (STOPPED, 0),
        (STOPPED + "os.abort()", -signal.SIGABRT),
        (STOPPED + "os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_ways_to_end(end: str, status: int) -> None:
    before = {*os.listdir("/dev/shm"), *(name for name in os.listdir("/tmp") if name.startswith("dtorch"))}
    ended = run(TWO + end)
    assert (ended.status, ended.left) == (status, []), ended.err
    after = {*os.listdir("/dev/shm"), *(name for name in os.listdir("/tmp") if name.startswith("dtorch"))}
    assert after <= before


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.2, 0.8])
def test_killed_while_the_pool_starts(seconds: float) -> None:
    """The warden imports torch then, and has not looked at its socket yet."""
    with running("import os, dtorch\ndtorch.ones\nprint(flush=True)\ndtorch.ones(2)\nos.read(0, 1)") as client:
        client.line()
        time.sleep(seconds)
        client.process.kill()
        client.process.wait()
        assert client.gone() == []


@pytest.mark.parametrize("how", ["thread", "asyncio"])
def test_a_death_that_the_warden_cannot_tell_of_is_noticed(how: str) -> None:
    """It is stopped, by a debugger say; so nobody tells of the death, and nobody else waits for it for ever."""
    wait = {"thread": "t.to_torch()", "asyncio": "asyncio.run(main())"}[how]
    ended = run(
        TWO
        + f"""
import asyncio
async def main(): await t
t = stuck()
os.kill(client().pool.warden_pid, signal.SIGSTOP)
os.kill(client().pool.pids[1], signal.SIGKILL)
began = time.monotonic()
try:
    {wait}
except dtorch.ExecutorDiedError as error:
    print("executor 1 " in str(error), "does not answer" in str(error), time.monotonic() - began < 15)
dtorch.restart()
print(dtorch.ones(2).sum().item())
"""
    )
    assert (ended.status, ended.out, ended.left) == (0, "True True True\n2.0\n", []), ended.err
