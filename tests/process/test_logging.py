"""What dtorch says, and where: loggers, ranks before lines, nothing twice, nothing installed."""

from __future__ import annotations

import io
import logging
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
import torch

import dtorch
from dtorch import Shard, init_device_mesh
from dtorch.executor import streams
from dtorch.executor.output import LineReader, Sink, ToClient
from dtorch.executor.streams import RankedStream, prefix
from dtorch.runtime.client import client

from .scripts import ROOT, run_body

PRINTS = """
import asyncio, logging, os, subprocess, sys, threading, time
import torch, dtorch
from dtorch import Replicate, Shard

def prints(rank):
    print("out of", rank)
    print("two", end="")
    print(" pieces\\nand two lines")
    print("err of", rank, file=sys.stderr)
    os.write(1, b"raw\\n")
    logging.getLogger("mine").warning("warned by %d", rank)
    logging.getLogger("mine").info("not shown by %d", rank)
    return torch.ones(1)

def run(n, function=prints):
    mesh = dtorch.init_device_mesh("cpu", (n,))
    return dtorch.from_local(function, mesh, [Shard(0)], shape=(n,)).sum().item()
"""


# -- what executors print -------------------------------------------------------------------------------------------


def test_lines_begin_with_the_rank_that_wrote_them() -> None:
    done = run_body(PRINTS + "run(4)\n", DTORCH_CPU_EXECUTORS="2")
    out, err = done.stdout.splitlines(), done.stderr.splitlines()
    for rank in range(4):
        mine = [line for line in out if line.startswith(f"[rank {rank}] ")]
        assert mine == [f"[rank {rank}] {text}" for text in (f"out of {rank}", "two pieces", "and two lines")]
        assert [line for line in err if line.startswith(f"[rank {rank}] ")] == [
            f"[rank {rank}] err of {rank}",
            f"[rank {rank}] warned by {rank}",
        ]
    # What Python does not see has its executor's number.
    assert sorted(line for line in out if line.endswith("raw")) == ["[executor 0] raw"] * 2 + ["[executor 1] raw"] * 2
    assert len(out) == 4 * 4 and len(err) == 8


def test_an_operator_of_the_users_prints_with_its_rank_and_threads_with_all() -> None:
    done = run_body(
        PRINTS
        + """
@torch.library.custom_op("mine::say", mutates_args=())
def say(x: torch.Tensor) -> torch.Tensor:
    print("hello")
    thread = threading.Thread(target=print, args=("from a thread",))
    thread.start()
    thread.join()
    return x.clone()

@say.register_fake
def _(x):
    return torch.empty_like(x)

x = dtorch.ones(1, device_mesh=dtorch.init_device_mesh("cpu", (3,)))
for _ in range(2):      # the first run of a plan is not like the later ones
    say(x).sum().item()
""",
        DTORCH_CPU_EXECUTORS="2",
    )
    lines = done.stdout.splitlines()
    assert sorted(lines) == sorted(
        2
        * [
            "[rank 0] hello",
            "[rank 1] hello",
            "[rank 2] hello",
            "[ranks 0, 2] from a thread",
            "[ranks 0, 2] from a thread",
            "[rank 1] from a thread",
        ]
    )


def test_handlers_of_the_users_on_executors_write_with_the_rank() -> None:
    done = run_body(
        PRINTS
        + """
def configured(rank):
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("mine").info("step of %d\\nsecond line", rank)
    try:
        raise ValueError("caught")
    except ValueError:
        logging.exception("it failed")
    return torch.ones(1)

run(2, configured)
"""
    )
    lines = done.stderr.splitlines()
    for rank in (0, 1):
        mine = [line.removeprefix(f"[rank {rank}] ") for line in lines if line.startswith(f"[rank {rank}] ")]
        assert mine[:4] == [
            f"INFO mine: step of {rank}",
            "second line",
            "ERROR root: it failed",
            "Traceback (most recent call last):",
        ]
        assert mine[-1] == "ValueError: caught"
    assert all(line.startswith("[rank ") for line in lines)


def test_no_prefix_where_none_is_wanted() -> None:
    done = run_body(PRINTS + "run(1)\n", DTORCH_EXECUTOR_PREFIX="0")
    assert done.stdout == "out of 0\ntwo pieces\nand two lines\nraw\n"
    assert done.stderr == "err of 0\nwarned by 0\n"


def test_quiet_drops_lines_and_keeps_the_last_for_a_death() -> None:
    done = run_body(
        PRINTS
        + """
print(run(1))
def dies(rank):
    print("the last words", file=sys.stderr)
    os._exit(3)
try:
    run(1, dies)
except dtorch.ExecutorDiedError as error:
    print("[rank 0] the last words" in str(error))
""",
        DTORCH_EXECUTOR_OUTPUT="quiet",
    )
    assert (done.stdout, done.stderr) == ("1.0\nTrue\n", "")


def test_lines_may_go_to_loggers() -> None:
    done = run_body(
        PRINTS
        + """
class Seen(logging.Handler):
    def emit(self, record):
        print(record.levelname, record.name, record.executor, record.stream, record.getMessage())
logging.getLogger("dtorch.executor").addHandler(Seen())
logging.getLogger("dtorch").setLevel(logging.INFO)
logging.getLogger("dtorch").propagate = False
dtorch.configure(executor_output="log")
print(run(2))
""",
        DTORCH_CPU_EXECUTORS="2",
    )
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert "2.0" in lines
    for e in (0, 1):
        assert [line for line in lines if f" dtorch.executor.{e} {e} stdout" in line] == [
            f"INFO dtorch.executor.{e} {e} stdout [rank {e}] out of {e}",
            f"INFO dtorch.executor.{e} {e} stdout [rank {e}] two pieces",
            f"INFO dtorch.executor.{e} {e} stdout [rank {e}] and two lines",
            f"INFO dtorch.executor.{e} {e} stdout [executor {e}] raw",
        ]
        assert [line for line in lines if f" dtorch.executor.{e} {e} stderr" in line] == [
            f"WARNING dtorch.executor.{e} {e} stderr [rank {e}] err of {e}",
            f"WARNING dtorch.executor.{e} {e} stderr [rank {e}] warned by {e}",
        ]


def test_lines_in_the_log_arrive_in_coroutines_and_at_the_end() -> None:
    done = run_body(
        PRINTS
        + """
class Seen(logging.Handler):
    def emit(self, record):
        print("logged", record.getMessage(), flush=True)
logging.getLogger("dtorch.executor").addHandler(Seen())
logging.getLogger("dtorch").propagate = False
dtorch.configure(executor_output="log", executor_prefix=False)

def says(what):
    def function(rank):
        print(what, file=sys.stderr)
        time.sleep(0.5)
        return torch.ones(1)
    return function

mesh = dtorch.init_device_mesh("cpu", (1,))
async def main():
    await dtorch.from_local(says("awaited"), mesh, [Shard(0)], shape=(1,))
    print("there", flush=True)
asyncio.run(main())
dtorch.from_local(says("nobody waits"), mesh, [Shard(0)], shape=(1,))
print("last line", flush=True)
""",
    )
    assert done.stdout == "logged awaited\nthere\nlast line\nlogged nobody waits\n"
    assert done.stderr == ""


def test_a_flood_of_lines_never_waits_for_the_client() -> None:
    """Far more than is held back, while the client looks at nothing: the rest goes to the streams, and none is lost."""
    done = run_body(
        PRINTS
        + """
seen = []
class Seen(logging.Handler):
    def emit(self, record):
        seen.append(record.getMessage())
logging.getLogger("dtorch.executor").addHandler(Seen())
logging.getLogger("dtorch").setLevel(logging.INFO)
logging.getLogger("dtorch").propagate = False
dtorch.configure(executor_output="log", executor_prefix=False)
read, write = os.pipe()
path = f"/proc/{os.getpid()}/fd/{write}"

def floods(rank):
    for i in range(40_000):
        print(f"<{i}:" + "x" * 100 + ">")
    with open(path, "w") as end:
        end.write("!")
    return torch.ones(1)

mesh = dtorch.init_device_mesh("cpu", (1,))
made = dtorch.from_local(floods, mesh, [Shard(0)], shape=(1,))
assert os.read(read, 1) == b"!"     # it is done before anyone here has looked at dtorch again
made.to_torch()
dtorch.shutdown()
print(len(seen), file=sys.stderr)
for line in seen:
    print(line)
""",
    )
    numbers = [int(n) for n in re.findall(r"(?m)^<(\d+):x{100}>$", done.stdout)]
    assert sorted(numbers) == list(range(40_000))
    assert 0 < int(done.stderr) < 40_000


# -- what dtorch says itself ----------------------------------------------------------------------------------------

SAYS = """
import logging, sys
import torch, dtorch
CONFIGURE
mesh = dtorch.init_device_mesh("cpu", (2,))
weight = dtorch.ones(8, 4, device_mesh=mesh)
bad = torch.nn.functional.embedding(dtorch.tensor([0, 99], device_mesh=mesh), weight)
del bad
weight.sum().item()
weight.to_local(1)
weight.sum().item()
"""


def test_nothing_is_installed_and_what_matters_shows_on_stderr() -> None:
    done = run_body(
        SAYS.replace("CONFIGURE", "")
        + """
root, mine = logging.getLogger(), logging.getLogger("dtorch")
assert not root.handlers and not mine.handlers and mine.propagate and mine.level == logging.NOTSET
names = [n for n in logging.Logger.manager.loggerDict if n == "dtorch" or n.startswith("dtorch.")]
assert all(not logging.getLogger(n).handlers for n in names), names
"""
    )
    told, summary = done.stderr.splitlines()
    assert told.startswith("a value was dropped unread, and could not be computed: IndexError: index out of range")
    assert "on ranks 0-1 (cpu), issued at <string>:7 in <module>" in told
    assert summary.startswith("1 failed operation whose value nobody asked for; the first: IndexError")
    assert done.stdout == ""


def test_a_programs_own_configuration_rules() -> None:
    configure = 'logging.basicConfig(format="%(levelname)s|%(name)s|%(message)s", stream=sys.stdout)'
    done = run_body(SAYS.replace("CONFIGURE", configure))
    assert done.stderr == ""
    told, summary = done.stdout.splitlines()
    assert told.startswith("ERROR|dtorch|a value was dropped unread")
    assert summary.startswith("ERROR|dtorch|1 failed operation")
    done = run_body(SAYS.replace("CONFIGURE", 'logging.getLogger("dtorch").setLevel(logging.CRITICAL)'))
    assert (done.stdout, done.stderr) == ("", "")


def test_a_handler_that_uses_dtorch_itself_does_no_harm() -> None:
    """Handlers run outside every lock, so one may ask for values."""
    configure = """
class Asks(logging.Handler):
    def emit(self, record):
        print(dtorch.ones(3).sum().item(), flush=True)
logging.getLogger("dtorch").addHandler(Asks())
"""
    done = run_body(SAYS.replace("CONFIGURE", configure) + 'logging.getLogger("dtorch").setLevel(logging.CRITICAL)\n')
    assert done.stdout == "3.0\n" and done.stderr == ""


def test_a_death_that_nobody_meets_is_told_at_the_end() -> None:
    body = """
        import os, signal, time
        import torch, dtorch
        from dtorch.runtime.client import client
        mesh = dtorch.init_device_mesh("cpu", (2,))
        x = dtorch.ones(4, device_mesh=mesh)
        x.sum().item(); x.to_local(1)
        os.kill(client().pool.pids[1], signal.SIGKILL)
        time.sleep(0.5)
    """
    done = run_body(body)
    assert re.fullmatch(
        r"executor 1 \(pid \d+\) was ended by signal SIGKILL \(.*\)\n"
        r"The pool has ended with it; nothing needed it after that\n",
        done.stderr,
    ), done.stderr
    # Whoever met it has been told.
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body) + "x.sum().item()\n"],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 1
    assert done.stderr.count("was ended by signal SIGKILL") == 1
    assert "ExecutorDiedError: executor 1" in done.stderr and "nothing needed it" not in done.stderr


def test_an_executor_that_dies_prints_whole_lines_to_the_end() -> None:
    done = run_body(
        PRINTS
        + """
def dies(rank):
    if rank == 1:
        print("whole", flush=True)
        print("half a line", end="", flush=True)
        os._exit(3)
    return torch.ones(1)
try:
    run(2, dies)
except dtorch.ExecutorDiedError:
    pass
"""
    )
    assert done.stdout.splitlines() == ["[rank 1] whole", "[rank 1] half a line"]


@pytest.fixture
def _settled() -> Iterator[None]:
    yield
    c = client()
    c.drain()
    c.failures._asked |= set(c.failures._reports)


def test_what_was_asked_for_is_not_logged(_settled: None, caplog: pytest.LogCaptureFixture) -> None:
    mesh = init_device_mesh("cpu", (2,))

    def fails(rank: int) -> torch.Tensor:
        raise ValueError("asked for")

    with caplog.at_level(logging.INFO, "dtorch"):
        bad = dtorch.from_local(fails, mesh, [Shard(0)], shape=(2,))
        with pytest.raises(ValueError):
            bad.to_torch()
        del bad
        for _ in range(3):
            dtorch.ones(2, device_mesh=mesh).to_local(1)
    assert [r.getMessage() for r in caplog.records] == []


# -- the pieces, without processes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        (["a\n", "b\n"], "[rank 3] a\n[rank 3] b\n"),
        (["a", "b", "\n"], "[rank 3] ab\n"),
        (["a\nb", "c\n\n"], "[rank 3] a\n[rank 3] bc\n[rank 3] \n"),
        (["10%\r", "20%\r", "done\n"], "[rank 3] 10%\r[rank 3] 20%\r[rank 3] done\n"),
        (["", "x\r\n", ""], "[rank 3] x\r\n"),
        (["one\x0btwo\x85three\n"], "[rank 3] one\x0btwo\x85three\n"),
    ],
)
def test_a_prefix_stands_where_a_line_begins(written: list[str], wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_ranks", lambda: (3,))
    raw = io.BytesIO()
    stream = RankedStream(raw, encoding="utf-8", line_buffering=True, newline="")
    for text in written:
        assert stream.write(text) == len(text)
    stream.flush()
    assert raw.getvalue().decode() == wanted


def test_prefixes() -> None:
    assert prefix(()) == "" and prefix((2,)) == "[rank 2] " and prefix((0, 2)) == "[ranks 0, 2] "


def test_long_lines_fit_messages() -> None:
    told: list[dict[str, object]] = []
    read, write = os.pipe()
    out, out_end = os.pipe()
    sink = Sink(out_end)
    lines = LineReader(read, ToClient(told.append, lambda: 0, 4, "stderr", sink), "[executor 4] ")
    data = b"short\n" + b"y" * 50_000 + b"\n" + b"\xff\xfe\n" + b"\n"
    os.write(write, data)
    while lines.pump() and sum(len(m["lines"]) for m in told) < 7:  # type: ignore[arg-type]
        pass
    got = [line for m in told for line in m["lines"]]  # type: ignore[attr-defined]
    assert got[0] == "[executor 4] short" and got[-2:] == ["[executor 4] \\xff\\xfe", "[executor 4] "]
    assert "".join(got[1:-2]) == "[executor 4] " + "y" * 50_000
    assert all(sum(map(len, m["lines"])) <= 16 << 10 for m in told)  # type: ignore[arg-type, attr-defined]
    lines.close()
    sink.release()
    os.close(write)
    os.close(out)
