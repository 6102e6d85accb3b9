"""The pool and its warden, with real processes and real signals."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pty
import re
import select
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
import pytest

from dtorch.errors import ExecutorDiedError, PoolError
from dtorch.executor.pool import Pool
from dtorch.runtime.config import Config, available_cores
from dtorch.runtime.ring import Writer
from dtorch.runtime.shared import ABORT, DEAD, DEAD_POOL, EXECUTOR_PID, executor_line

ROOT = Path(__file__).parents[2]
NO_TORCH = str(Path(__file__).with_name("no_torch"))
ENTRIES = "tests.process.pool_entries"
CONFIG = Config(max_executors=16, arena_bytes=1 << 20, ring_bytes=1 << 20, slots=64, start_timeout=60)


@contextlib.contextmanager
def importing(torch: bool) -> Iterator[None]:
    """What wardens started meanwhile import as torch: the real one, or one that costs nothing."""
    if not torch:
        sys.path.insert(0, NO_TORCH)
    try:
        yield
    finally:
        if not torch:
            sys.path.remove(NO_TORCH)


class Driver:
    """A pool of stand-in executors, and a way to tell them what to do."""

    def __init__(self, n: int = 2, config: Config = CONFIG, torch: bool = False, **options: Any) -> None:
        # Lines as they are, unless a test is about what stands before them.
        self.pool = Pool(config, entry=f"{ENTRIES}:obey", **{"prefix": False, **options})
        self.writer = Writer(self.pool.state, config)
        with importing(torch):
            self.grow(n)

    def grow(self, n: int) -> None:
        for executor in range(len(self.writer.readers), n):
            self.writer.add_reader(executor)
        self.pool.ensure(n)

    def tell(self, executor: int, action: str, *arguments: Any) -> None:
        self.writer.send_control(json.dumps([executor, action, *arguments]).encode(), sync=True)

    def answer(self, executor: int, timeout: float = 20) -> Any:
        reader = self.pool.replies()[executor]
        got: list[bytes] = []
        assert until(lambda: bool(got.extend(reader.drain()) or got), timeout), f"executor {executor} says nothing"
        return json.loads(got[0])

    def ask(self, executor: int, action: str, *arguments: Any) -> Any:
        self.tell(executor, action, *arguments)
        return self.answer(executor)


def until(condition: Callable[[], Any], timeout: float) -> bool:
    """Whether `condition` comes true within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def gone(pid: int) -> bool:
    """Whether process `pid` has ended (reaped or not: an orphan's reaping is init's business)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


def client(code: str, *, args: tuple[str, ...] = (), **options: Any) -> subprocess.Popen[str]:
    """Another Python process that runs `code` as a client, with its own pool helpers."""
    head = "from tests.process.test_pool import *\n"
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT, **options}
    return subprocess.Popen([sys.executable, "-c", head + textwrap.dedent(code), *args], **options)


@pytest.fixture
def driver() -> Iterator[Driver]:
    """Two executors."""
    driver = Driver(2)
    yield driver
    driver.pool.shutdown()


@pytest.fixture(scope="module")
def shared() -> Iterator[Driver]:
    """Executors that tests share, as long as they harm none."""
    driver = Driver(2, torch=True, options={"color": "blue"})
    yield driver
    driver.pool.shutdown()


@contextlib.contextmanager
def opened(*args: Any, **kwargs: Any) -> Iterator[Pool]:
    pool = Pool(*args, **kwargs)
    try:
        yield pool
    finally:
        pool.shutdown()


# -- starting ---------------------------------------------------------------------------------------------------------


def test_executors_are_forked_by_a_warden_with_one_thread(shared: Driver) -> None:
    pool = shared.pool
    assert pool.hello is not None and pool.hello["threads"] == 1
    assert pool.alive == [0, 1]
    assert pool.check() and pool.error() is None and pool.deaths() == []
    facts = [shared.ask(e, "facts") for e in (0, 1)]
    assert [f["pid"] for f in facts] == [pool.pids[0], pool.pids[1]]
    control = pool.state.control
    assert [control[executor_line(e) + EXECUTOR_PID] for e in (0, 1)] == [f["pid"] for f in facts]
    for executor, f in enumerate(facts):
        assert f["parent"] == pool.warden_pid
        assert f["session"] == pool.warden_pid != os.getsid(0)
        assert f["threads"] == 1
        assert f["name"] == f"dtorch-exec-{executor}"
        assert f["path"][: len(sys.path)] == sys.path
        assert f["options"] == {"collectives": "shm", "color": "blue", "threads": pool.threads_for(2)}
    warden = Path(f"/proc/{pool.warden_pid}")
    assert (warden / "comm").read_text() == "dtorch-warden\n"
    assert len(list((warden / "task").iterdir())) == 1


def test_executors_hold_only_the_descriptors_they_need(shared: Driver) -> None:
    secret, other = os.pipe()
    try:
        os.set_inheritable(secret, True)
        for executor in (0, 1):
            fds = shared.ask(executor, "facts")["fds"]
            kinds = [re.sub(r":\[\d+\]", "", fd.removesuffix(" (deleted)")) for fd in fds]
            # Mapping a file keeps a descriptor of its own, so each of these comes twice. Nothing else is there: not
            # the client's, the warden's or a sibling's.
            assert sorted(kinds) == sorted(
                # Stacks: where it prints, when the warden asks, what it is at.
                ["/dev/null", "pipe", "pipe", "/memfd:dtorch-stacks"]
                + [f"/memfd:dtorch-{name}" for name in ("control", "ring", "arena", "collective", "reply")] * 2
                + ["anon_inode:[eventfd]"] * 2
            )
    finally:
        os.close(secret)
        os.close(other)


def test_the_users_environment_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "7")
    monkeypatch.setenv("PYTHONINSPECT", "1")
    driver = Driver(1)
    try:
        assert driver.ask(0, "facts")["environ"] == {"OPENBLAS_NUM_THREADS": "7", "PYTHONINSPECT": "1"}
    finally:
        driver.pool.shutdown()
    assert os.environ["OPENBLAS_NUM_THREADS"] == "7"


def test_the_pool_grows(shared: Driver) -> None:
    before = shared.pool.pids
    began = time.monotonic()
    shared.grow(4)
    assert time.monotonic() - began < 2
    assert shared.pool.alive == [0, 1, 2, 3]
    assert {e: pid for e, pid in shared.pool.pids.items() if e < 2} == before
    shared.pool.ensure(3)  # fewer than there are: nothing to do
    assert sorted(shared.pool.replies()) == [0, 1, 2, 3]
    assert shared.ask(3, "facts")["options"]["threads"] == shared.pool.threads_for(4)


def test_prestart_returns_at_once_and_ensure_waits() -> None:
    with opened(CONFIG, entry=f"{ENTRIES}:obey") as pool:
        began = time.monotonic()
        pool.prestart()
        assert time.monotonic() - began < 0.5  # importing torch takes longer
        assert pool.alive == []
        pool.prestart()
        pool.ensure(1)
        assert pool.alive == [0]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_loop_runs_on_while_the_pool_starts(backend: str) -> None:
    async def main() -> tuple[int, float]:
        longest, turns = 0.0, 0
        with opened(CONFIG, entry=f"{ENTRIES}:obey") as pool:
            async with anyio.create_task_group() as group:
                group.start_soon(pool.ensure_async, 2)
                group.start_soon(pool.ensure_async, 3)
                last = time.monotonic()
                while len(pool.alive) < 3:
                    await anyio.sleep(0.001)
                    longest, last, turns = max(longest, time.monotonic() - last), time.monotonic(), turns + 1
            # A blocking call in the middle of it all does not deadlock.
            with anyio.move_on_after(0) as scope:
                await pool.ensure_async(4)
            assert scope.cancelled_caught
            pool.ensure(4)
            assert pool.alive == [0, 1, 2, 3]
        return turns, longest

    turns, longest = anyio.run(main, backend=backend)
    assert turns > 20
    assert longest < 0.5


def test_several_threads_may_wait_for_the_same_start() -> None:
    with importing(torch=False), opened(CONFIG, entry=f"{ENTRIES}:obey") as pool:
        threads = [threading.Thread(target=pool.ensure, args=(n,)) for n in (1, 3, 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert pool.alive == [0, 1, 2]


def test_threads_share_the_cores(shared: Driver) -> None:
    torch = sys.modules.get("torch")
    alone = torch.get_num_threads() if torch else available_cores()
    assert shared.pool.threads_for(1) == alone
    assert shared.pool.threads_for(available_cores() * 2) == 1
    assert shared.pool.threads_for(2) == max(1, min(alone, available_cores() // 2))


# -- starting that fails ----------------------------------------------------------------------------------------------


def test_a_missing_torch_is_told_in_one_paragraph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch_cpu.so: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with opened(CONFIG) as pool:
        with pytest.raises(PoolError) as caught:
            pool.ensure(1)
        assert not isinstance(caught.value, ExecutorDiedError)
        first, *rest = str(caught.value).splitlines()
        assert first.startswith("the pool could not start: its first process (")
        assert first.endswith("ended with exit code 1: ImportError: libtorch_cpu.so: cannot open shared object file")
        assert 'torch.py", line 1, in <module>' in "\n".join(rest)
        with pytest.raises(PoolError, match="libtorch_cpu"):
            pool.ensure(1)  # the same again, at once


def test_a_warden_that_crashes_on_import_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with opened(CONFIG) as pool, pytest.raises(PoolError, match="was ended by signal SIGSEGV: it said nothing"):
        pool.ensure(1)


def test_a_library_that_starts_threads_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, name='telemetry', daemon=True).start()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with opened(CONFIG, entry="json:loads") as pool, pytest.raises(PoolError, match=r"2 threads .*telemetry"):
        pool.ensure(1)


def test_an_executor_that_fails_while_starting_is_told() -> None:
    with importing(torch=False), opened(CONFIG, entry=f"{ENTRIES}:broken") as pool:
        with pytest.raises(ExecutorDiedError) as caught:
            pool.ensure(1)
        assert f"executor 0 (pid {pool.deaths()[0].pid}) ended with exit code 1" in str(caught.value)
        assert "RuntimeError: no device for executor 0" in str(caught.value)


def test_a_start_that_takes_too_long_says_what_to_raise() -> None:
    config = Config(max_executors=16, arena_bytes=1 << 20, start_timeout=0.01)
    with importing(torch=False), opened(config, entry=f"{ENTRIES}:late") as pool:
        with pytest.raises(PoolError, match=r"within 0\.01 s: its warden still imports torch.*DTORCH_START_TIMEOUT"):
            pool.ensure(2)
        assert until(lambda: pool.check() and pool.hello is not None, 60)
        with pytest.raises(PoolError, match=r"of 2 executors, \[0, 1\] are not ready"):
            pool.ensure(2)


def test_more_executors_than_the_pool_can_have(shared: Driver) -> None:
    with pytest.raises(PoolError, match=r"17 executors .* at most 16; .*configure\(max_executors=17\)"):
        shared.pool.ensure(17)
    assert shared.pool.check()


def test_an_interpreter_that_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    fds = count_fds()
    for executable, words in (("", "embedded interpreter"), ("/nowhere/python", "/nowhere/python cannot be run")):
        monkeypatch.setattr(sys, "executable", executable)
        with opened(CONFIG) as pool, pytest.raises(PoolError, match=words):
            pool.ensure(1)
        del pool  # its control words stay mapped while someone may look at them
    monkeypatch.undo()
    assert count_fds() == fds


def test_run_by_hand_it_says_what_it_is() -> None:
    done = subprocess.run([sys.executable, "-m", "dtorch.executor"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("dtorch.executor is started by the pool") and len(done.stderr.splitlines()) == 1


# -- nothing of the user's runs twice ---------------------------------------------------------------------------------


def test_scripts_and_customisations_run_once(tmp_path: Path) -> None:
    """A script without a __main__ guard, sitecustomize, and modules that hide others in the working directory."""
    (tmp_path / "sitecustomize.py").write_text(f"open({str(tmp_path / 'customised')!r}, 'a').write('x')\n")
    (tmp_path / "here").mkdir()
    for name in ("json", "socket", "random"):
        (tmp_path / "here" / f"{name}.py").write_text("raise SystemExit('hidden')\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "user_helper.py").write_text("")
    (tmp_path / "bin" / "script.py").write_text(
        textwrap.dedent(
            f"""
            print("script runs", flush=True)
            import sys
            sys.path.append({str(ROOT)!r})
            from tests.process.test_pool import Driver
            driver = Driver(1)
            facts = driver.ask(0, "facts")
            assert facts["path"][1:] == sys.path, facts["path"]
            print(facts["modules"])
            """
        )
    )
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, tmp_path / "bin" / "script.py"],
        cwd=tmp_path / "here",
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    runs, modules = done.stdout.splitlines()
    assert runs == "script runs"
    assert (tmp_path / "customised").read_text() == "x"
    assert "sitecustomize" not in modules
    # The client's half is not loaded there.
    assert not {"dtorch.tensor", "dtorch.executor.pool", "dtorch.graph"} & set(re.findall(r"'([^']+)'", modules))


# -- death ------------------------------------------------------------------------------------------------------------


def test_kill_9_of_an_executor_is_noticed(driver: Driver) -> None:
    pool, control = driver.pool, driver.pool.state.control
    driver.ask(1, "say", "stderr", "about to divide\nby zero\n")
    assert driver.ask(0, "collective") == "waiting"
    watch = select.epoll()
    watch.register(pool.state.done_fd, select.EPOLLIN | select.EPOLLET)
    watch.poll(0)
    pid = pool.pids[1]
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    while not control[DEAD]:
        assert watch.poll(1), "nobody was woken"
    noticed = time.monotonic() - began
    assert noticed < 1
    # The reason is there as soon as the word is.
    (death,) = pool.deaths()
    assert (death.executor, death.pid) == (1, pid)
    assert death.reason.startswith("was ended by signal SIGKILL")
    assert death.stderr == ("about to divide", "by zero")
    assert (control[DEAD], control[ABORT]) == (2, 1)
    # Its peer, in a futex that would wait for 20 seconds, is free.
    assert driver.answer(0) - began < 1
    assert pool.alive == [0]
    assert not pool.check()
    with pytest.raises(ExecutorDiedError, match=r"(?s)executor 1 \(pid \d+\) was .* by zero\n.*dtorch\.restart\(\)"):
        pool.ensure(2)
    watch.close()


@pytest.mark.parametrize(
    ("action", "arguments", "reason", "line"),
    [
        ("exit", (3,), "ended with exit code 3", None),
        ("exit", (0,), "ended with exit code 0", None),
        ("raise", ("odd",), "ended with exit code 1", "ValueError: odd"),
        ("segfault", (), "was ended by signal SIGSEGV", "Fatal Python error: Segmentation fault"),
    ],
)
def test_ends_of_an_executor(
    driver: Driver, action: str, arguments: tuple[Any, ...], reason: str, line: str | None
) -> None:
    driver.tell(0, action, *arguments)
    assert until(driver.pool.deaths, 10)
    (death,) = driver.pool.deaths()
    assert death.reason == reason
    assert line is None or line in death.stderr
    assert isinstance(driver.pool.error(), ExecutorDiedError)


def test_only_the_last_lines_are_kept(driver: Driver) -> None:
    driver.ask(0, "say", "stderr", "".join(f"line {i} {'é' * 500}\n" for i in range(100)))
    driver.tell(0, "exit", 1)
    assert until(driver.pool.deaths, 10)
    lines = driver.pool.deaths()[0].stderr
    assert len(lines) == 20
    assert [line.split()[1] for line in lines] == [str(i) for i in range(80, 100)]
    assert all(len(line) == 400 for line in lines)


def test_a_child_of_the_user_does_not_hide_a_death(driver: Driver) -> None:
    """It holds the executor's stderr open, so the pipe does not end."""
    child = driver.ask(0, "child")
    driver.tell(0, "exit", 5)
    assert until(lambda: driver.pool.state.control[DEAD], 1)
    assert driver.pool.deaths()[0].reason == "ended with exit code 5"
    assert not gone(child)


def test_kill_9_of_the_warden(driver: Driver) -> None:
    pool = driver.pool
    pids = list(pool.pids.values())
    assert pool.warden_pid is not None
    os.kill(pool.warden_pid, signal.SIGKILL)
    assert until(lambda: not pool.check(), 1)
    control = pool.state.control
    assert control[DEAD] & DEAD_POOL and control[ABORT]
    assert until(lambda: all(map(gone, pids)), 1)
    assert pool.deaths() == [] and pool.alive == []
    error = pool.error()
    assert not isinstance(error, ExecutorDiedError)
    assert re.search(r"warden of the executors \(pid \d+\) was ended by signal SIGKILL", str(error))


@pytest.mark.parametrize("busy", [False, True])
def test_kill_9_of_the_client_leaves_nothing(busy: bool) -> None:
    """Also while an executor is inside a kernel, and a forked child of the client holds all its descriptors."""
    process = client(
        f"""
        import ctypes
        driver = Driver(2)
        if {busy}:
            driver.ask(0, "busy", 30)
            child = ctypes.CDLL(None).fork()  # behind Python's back, so that nothing is closed in it
            if child == 0:
                time.sleep(30)
        else:
            child = os.fork()
            if child == 0:
                time.sleep(30)
        print(json.dumps([child, driver.pool.warden_pid, *driver.pool.pids.values()]), flush=True)
        time.sleep(60)
        """
    )
    assert process.stdout
    child, *pids = json.loads(process.stdout.readline())
    try:
        assert not any(map(gone, pids))
        process.kill()
        began = time.monotonic()
        assert until(lambda: all(map(gone, pids)), 2), [pid for pid in pids if not gone(pid)]
        print(f"all gone after {time.monotonic() - began:.3f} s")
        assert not gone(child)
    finally:
        process.kill()
        os.kill(child, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("pass", 0),
        ("raise RuntimeError('user error')", 1),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)", -signal.SIGTERM),
        ("os._exit(7)", 7),
    ],
)
def test_ends_of_the_client_leave_nothing(end: str, status: int) -> None:
    process = client(
        f"""
        driver = Driver(1)
        print(json.dumps([driver.pool.warden_pid, *driver.pool.pids.values()]), flush=True)
        {end}
        """
    )
    assert process.stdout
    pids = json.loads(process.stdout.readline())
    process.communicate(timeout=20)
    assert process.returncode == status
    assert until(lambda: all(map(gone, pids)), 2)


def test_a_client_that_is_killed_while_the_warden_imports_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(f"import time\nopen({str(tmp_path / 'begun')!r}, 'w')\ntime.sleep(60)\n")
    process = client(
        f"""
        sys.path.insert(0, {str(tmp_path)!r})
        pool = Pool(CONFIG)
        pool.prestart()
        print(pool.warden_pid, flush=True)
        time.sleep(60)
        """
    )
    assert process.stdout
    warden = int(process.stdout.readline())
    assert until(lambda: (tmp_path / "begun").exists(), 30)
    assert not gone(warden)
    process.kill()
    process.communicate()
    assert until(lambda: gone(warden), 2)


# -- signals ----------------------------------------------------------------------------------------------------------


def test_ctrl_c_reaches_the_client_alone() -> None:
    """Typed at a real terminal: the client's process group gets it, and one KeyboardInterrupt comes of it."""
    parent, terminal = pty.openpty()
    process = client(
        """
        import fcntl, termios
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        driver = Driver(2)
        try:
            print("ready", flush=True)
            time.sleep(30)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        time.sleep(0.1)
        print(driver.pool.alive, driver.ask(0, "facts")["pid"] == driver.pool.pids[0], flush=True)
        """,
        stdin=terminal,
        start_new_session=True,
    )
    assert process.stdout
    try:
        assert process.stdout.readline() == "ready\n"
        os.write(parent, b"\x03")
        out, err = process.communicate(timeout=20)
        assert out == "interrupted\n[0, 1] True\n", err
        assert process.returncode == 0
    finally:
        process.kill()
        os.close(parent)
        os.close(terminal)


def test_interrupts_and_terminations_sent_to_all_change_nothing(shared: Driver) -> None:
    """A job manager signals every process it knows; a client that handles it still needs its executors."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        for pid in (*shared.pool.pids.values(), shared.pool.warden_pid):
            assert pid is not None
            # SIGHUP is for the warden, which has no terminal to lose.
            os.kill(pid, number)
    time.sleep(0.1)
    assert shared.pool.check()
    assert shared.ask(1, "facts")["pid"] == shared.pool.pids[1]


# -- output -----------------------------------------------------------------------------------------------------------


def test_output_arrives_in_whole_lines() -> None:
    process = client(
        """
        driver = Driver(4)
        driver.tell(-1, "print", 400, 3000)
        for e in range(4):
            driver.answer(e)
        driver.ask(0, "say", "stdout", "an unfinished line")
        """
    )
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    for fd, text in ((1, out), (2, err)):
        seen: dict[int, int] = dict.fromkeys(range(4), 0)
        lines = text.splitlines()
        if fd == 1:
            assert lines.pop() == "an unfinished line"
        for line in lines:
            found = re.fullmatch(r"<(\d)\.(\d)\.(\d+):(x*)>", line)
            assert found, line[:100]
            executor, i = int(found[1]), int(found[3])
            assert int(found[2]) == fd
            assert i == seen[executor] and len(found[4]) == i * 7919 % 3000
            seen[executor] += 1
        assert seen == dict.fromkeys(range(4), 400)


def test_lines_may_say_who_wrote_them() -> None:
    process = client(
        """
        driver = Driver(2, prefix=True)
        driver.ask(1, "say", "stdout", "one\\ntwo\\n")
        driver.ask(0, "say", "stderr", "three\\n")
        """
    )
    out, err = process.communicate(timeout=60)
    assert out == "[executor 1] one\n[executor 1] two\n"
    assert err == "[executor 0] three\n"


def test_a_reader_that_stopped_reading_does_not_hide_a_death() -> None:
    process = client(
        """
        driver = Driver(2)
        driver.tell(0, "print", 4000, 3000)     # far more than pipes and the warden hold
        time.sleep(0.5)
        driver.tell(1, "exit", 9)
        assert until(lambda: driver.pool.state.control[DEAD], 2)
        os.write(2, driver.pool.deaths()[0].reason.encode())
        os._exit(0)
        """,
        stderr=subprocess.DEVNULL,
    )
    # Nobody reads its stdout.
    assert process.wait(timeout=60) == 0
    process.communicate()


def test_a_reader_that_went_away_ends_nothing() -> None:
    process = client(
        """
        driver = Driver(1)
        print("go", flush=True)
        driver.ask(0, "print", 200, 3000)
        assert driver.pool.check()
        os.write(2, b"fine")
        """
    )
    assert process.stdout and process.stderr
    assert process.stdout.readline() == "go\n"
    process.stdout.close()
    assert "fine" in process.stderr.read()  # among what the executor wrote there
    assert process.wait(timeout=20) == 0
    process.stderr.close()


def test_closed_streams_of_a_daemon_do_not_matter() -> None:
    process = client(
        """
        os.close(0); os.close(1)
        driver = Driver(1)
        driver.ask(0, "say", "stdout", "into the void\\n")
        os.write(2, b"fine")
        os._exit(0)
        """
    )
    assert process.communicate(timeout=60)[1] == "fine"


def test_the_watchdog_says_who_is_stuck_and_who_waits() -> None:
    process = client(
        """
        driver = Driver(3, Config(max_executors=16, arena_bytes=1 << 20, watchdog=0.4))
        driver.pool.name_plan(17, "dtorch.user_function(f32[4, 8])")
        driver.pool.state.control[executor_line(1) + 8] = 17    # as its loop would say
        driver.ask(1, "busy", 1.0)
        driver.ask(0, "facts")
        time.sleep(1.5)
        """
    )
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert re.search(
        r"dtorch: executor 1 \(pid \d+\) has been in dtorch\.user_function\(f32\[4, 8\]\) for \d s\. "
        r"Meanwhile executors 0, 2 are done with all that was issued\. Where it is",
        err,
    ), err
    assert "in _busy" in err  # faulthandler, from the executor itself
    assert err.count("dtorch: ") <= 2  # told again only when its age has doubled


# -- ending -----------------------------------------------------------------------------------------------------------


def test_shutdown_is_quick_and_final(driver: Driver) -> None:
    pool = driver.pool
    pids = [pool.warden_pid, *pool.pids.values()]
    began = time.monotonic()
    pool.shutdown()
    assert time.monotonic() - began < 1
    assert all(gone(pid) for pid in pids if pid)
    assert pool.state.control[DEAD] & DEAD_POOL
    pool.shutdown()
    assert pool.alive == [] and pool.deaths() == [] and not pool.check()
    with pytest.raises(PoolError, match=r"is shut down; dtorch\.restart\(\)"):
        pool.ensure(1)
    with pytest.raises(PoolError, match="is shut down"):
        pool.prestart()


def test_shutdown_does_not_wait_for_a_kernel(driver: Driver) -> None:
    driver.ask(0, "busy", 30)
    began = time.monotonic()
    driver.pool.shutdown(timeout=0.6)
    assert 0.25 < time.monotonic() - began < 2


def test_shutdown_from_another_thread_ends_a_wait() -> None:
    pool = Pool(CONFIG, entry=f"{ENTRIES}:late")
    with importing(torch=False):
        pool.prestart()
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            pool.ensure(1)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)
    pool.shutdown()
    thread.join(5)
    assert [type(e) for e in caught] == [PoolError]


def test_restart_gives_a_fresh_pool(driver: Driver) -> None:
    old = driver.pool
    os.kill(old.pids[0], signal.SIGKILL)
    assert until(old.deaths, 5)
    with importing(torch=False):
        fresh = old.restart()
    try:
        fresh.ensure(2)
        assert fresh.alive == [0, 1]
        assert fresh.deaths() == [] and fresh.state.control[DEAD] == 0
        assert not set(fresh.pids.values()) & set(old.pids.values())
    finally:
        fresh.shutdown()


def count_fds() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_many_pools_leave_nothing() -> None:
    fds = children = None
    for cycle in range(12):
        driver = Driver(2)
        driver.grow(3)
        if cycle % 3 == 1:
            os.kill(driver.pool.pids[1], signal.SIGKILL)
        elif cycle % 3 == 2:
            assert driver.pool.warden_pid
            os.kill(driver.pool.warden_pid, signal.SIGKILL)
            assert until(lambda pool=driver.pool: not pool.check(), 5)
        driver.pool.shutdown()
        del driver
        if cycle == 2:
            fds, children = count_fds(), _children()
    assert count_fds() == fds
    assert _children() == children


def _children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def test_a_forked_child_cannot_use_the_pool_nor_harm_it(driver: Driver) -> None:
    inbox, outbox = os.pipe()
    child = os.fork()
    if child == 0:
        said = "nothing"
        try:
            try:
                driver.pool.ensure(1)
            except PoolError as error:
                said = str(error)
            assert not driver.pool.check() and driver.pool.alive == []
            driver.pool.shutdown()
            with importing(torch=False):
                fresh = driver.pool.restart()  # a pool of its own is what it may have
            fresh.ensure(1)
            said += f"|{fresh.alive}"
            fresh.shutdown()
        finally:
            os.write(outbox, said.encode())
            os._exit(0)
    os.close(outbox)
    with open(inbox) as stream:
        said, _, alive = stream.read().partition("|")
    os.waitpid(child, 0)
    assert re.fullmatch(
        rf"this process \({child}\) was forked from the one that started the pool \({os.getpid()}\), .*", said
    )
    assert alive == "[0]"
    assert driver.pool.check()
    assert driver.ask(0, "facts")["pid"] == driver.pool.pids[0]
