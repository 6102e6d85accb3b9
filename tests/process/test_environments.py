"""Machines that are short of something, and interpreters that are started in odd ways: it works, or says what to do."""

from __future__ import annotations

import ast
import os
import re
import resource
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from .clients import TWO, USE, Ended, run
from .namespaces import in_namespace, over
from .scripts import ROOT

WORKS = (0, "8.0\n", "", [])


def outcome(ended: Ended) -> tuple[int, str, str, list[str]]:
    """All there is to compare with WORKS."""
    return ended.status, ended.out, ended.err, ended.left


def last_line(ended: Ended) -> str:
    """What a failed program says in the end."""
    assert ended.status == 1 and ended.left == [], (ended.status, ended.left)
    return ended.err.strip().splitlines()[-1]


def limited(which: int, value: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(which, (value, value))


# -- limits -----------------------------------------------------------------------------------------------------------


def test_few_descriptors_are_enough() -> None:
    assert outcome(run(USE, limit=limited(resource.RLIMIT_NOFILE, 64))) == WORKS


@pytest.mark.parametrize("files", [16, 20, 24])
def test_too_few_descriptors_are_named(files: int) -> None:
    """Wherever they run out: in the client, in the warden, or on the way from one to the other."""
    said = last_line(run(USE, limit=limited(resource.RLIMIT_NOFILE, files)))
    assert re.search(
        rf"PoolError: .*: \[Errno 24\] Too many open files; the limit \(ulimit -n\) is {files} open descriptors, and a "
        r"pool of [12] takes about \d+; raise it: ulimit -n 1024",
        said,
    ), said


def test_too_few_descriptors_for_the_wardens_end() -> None:
    """The kernel drops what does not fit, without a word."""
    body = f"""
import resource, subprocess
real = subprocess.Popen
def popen(*arguments, **options):
    return real(*arguments, **options, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (9, 9)))
subprocess.Popen = popen
{USE}
"""
    ended = run(body)
    assert ended.status == 1 and ended.left == []
    assert "Too many open files; the limit (ulimit -n) is 9 open descriptors" in ended.err


def test_what_could_not_start_for_want_of_descriptors_leaves_none_open() -> None:
    """Whichever it was that could not be had, and nothing but PoolError is raised."""
    ended = run(
        """
        from tests.process.test_pool import *
        import resource
        sys.path.insert(0, NO_TORCH)        # which the wardens import instead of torch
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with opened(CONFIG, entry=f"{ENTRIES}:obey") as pool:
            pool.ensure(2)
        del pool
        before, outcomes = count_fds(), []
        for more in range(1, 32):
            resource.setrlimit(resource.RLIMIT_NOFILE, (before + more, hard))
            try:
                with opened(CONFIG, entry=f"{ENTRIES}:obey") as pool:
                    pool.ensure(2)
                outcomes.append("ready")
            except PoolError as error:
                outcomes.append("named" if "(ulimit -n)" in str(error) else str(error))
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            pool = None
            assert count_fds() == before, (more, outcomes[-1], count_fds(), before)
        print(outcomes)
        """
    )
    assert (ended.status, ended.left) == (0, []), ended.err
    outcomes = ast.literal_eval(ended.out)
    enough = outcomes.index("ready")
    assert 10 < enough < 30 and set(outcomes[:enough]) == {"named"} and set(outcomes[enough:]) == {"ready"}, outcomes


def test_too_few_processes_are_named() -> None:
    command = [sys.executable, "-c", USE]
    if os.geteuid() == 0:
        # The superuser is bound by no limit on processes, in whatever namespace: be someone else, who may read all.
        may = "-all,+dac_override,+dac_read_search"
        who = ["--reuid=12345", "--regid=12345", "--clear-groups", f"--inh-caps={may}", f"--ambient-caps={may}"]
        command = ["setpriv", *who, "prlimit", "--nproc=1", *command]
        said = last_line(run(command=command))
    else:
        said = last_line(run(command=command, limit=limited(resource.RLIMIT_NPROC, 1)))
    assert re.search(
        r"\[Errno 11\] .*; the limit \(ulimit -u\) is 1 processes and threads of this user; raise it:", said
    )


def test_little_address_space() -> None:
    """The arena takes its share of what may be used; where even that is too much, it is said what to ask for."""
    assert outcome(run(USE, limit=limited(resource.RLIMIT_AS, 12 << 30))) == WORKS
    said = last_line(run(USE, limit=limited(resource.RLIMIT_AS, 3 << 30)))
    assert re.search(
        r"\[Errno 12\] Cannot allocate memory; the limit \(ulimit -v\) is 3145728 KiB of address space; raise it: "
        r"ulimit -v unlimited; or ask for less: dtorch\.configure\(arena_bytes='256M', collective_bytes='64M'\)",
        said,
    ), said


def test_small_files_alone() -> None:
    """Shared memory counts as a file."""
    said = last_line(run(USE, limit=limited(resource.RLIMIT_FSIZE, 1 << 20)))
    assert re.search(
        r"\[Errno 27\] File too large; the limit \(ulimit -f\) is 2048 blocks .*: ulimit -f unlimited", said
    )
    small = {"DTORCH_ARENA_BYTES": "1M", "DTORCH_COLLECTIVE_BYTES": "8M", "DTORCH_RING_BYTES": "1M"}
    ended = run(USE, limit=limited(resource.RLIMIT_FSIZE, 64 << 20), env={**small})
    assert outcome(ended) == WORKS


def test_a_kernel_that_lets_no_anonymous_file_be_executed() -> None:
    """As hardened machines have it."""
    if not os.path.exists("/proc/sys/vm/memfd_noexec"):
        pytest.skip("this kernel has no vm.memfd_noexec")
    code = f"print(open('/proc/sys/vm/memfd_noexec').read(), end='')\n{USE}"
    command = in_namespace("echo 2 > /proc/sys/vm/memfd_noexec", [sys.executable, "-c", code], processes=True)
    assert outcome(run(command=command)) == (0, "2\n8.0\n", "", [])


def test_nothing_locked_and_a_small_stack() -> None:
    def limit() -> None:
        limited(resource.RLIMIT_MEMLOCK, 0)()
        limited(resource.RLIMIT_STACK, 1 << 20)()
        limited(resource.RLIMIT_CORE, 0)()

    assert outcome(run(USE, limit=limit)) == WORKS


# -- directories ------------------------------------------------------------------------------------------------------


def test_no_home_no_temporary_directory_and_no_name() -> None:
    """The user has no entry in /etc/passwd, and no variable says more."""
    env = dict.fromkeys(("HOME", "USER", "LOGNAME", "XDG_CACHE_HOME"))
    command = in_namespace("true", ["unshare", "-U", "--map-user=12345", sys.executable, "-c", USE])
    assert outcome(run(command=command, env={**env, "TMPDIR": "/nonexistent"})) == WORKS


@pytest.mark.parametrize("collectives", ["shm", "gloo"])
def test_shared_memory_lies_in_no_directory(collectives: str) -> None:
    """/dev/shm has room for one page, then none at all; whatever can be written to is read-only or full."""
    code = USE + "import os; print(os.listdir('/dev/shm')); print(dtorch.randn(1 << 18, device_mesh=mesh).numel())"
    mounts = over("size=4k", "/dev/shm", "/tmp")
    ended = run(command=in_namespace(mounts, [sys.executable, "-c", code]), env={"DTORCH_COLLECTIVES": collectives})
    assert outcome(ended) == (0, "8.0\n[]\n262144\n", "", [])
    read_only = over("ro", "/dev/shm", "/tmp", "/var/tmp")
    command = in_namespace(read_only, [sys.executable, "-c", "import os; os.chdir('/proc')\n" + USE])
    assert outcome(run(command=command, env={"HOME": "/tmp", "DTORCH_COLLECTIVES": collectives})) == WORKS


def test_a_directory_that_is_removed_under_the_program() -> None:
    """torch itself cannot be imported from there; a client that has imported it goes on."""
    code = f"import os, tempfile, torch\nd = tempfile.mkdtemp()\nos.chdir(d)\nos.rmdir(d)\n{USE}"
    assert outcome(run(code)) == WORKS


def test_no_proc() -> None:
    ended = run(command=in_namespace("mount -t tmpfs -o ro none /proc", [sys.executable, "-c", USE]))
    assert last_line(ended).endswith(
        "PoolError: the pool could not start: /proc is not mounted here, and its processes are watched there; mount "
        "it: mount -t proc proc /proc"
    )


# -- standard streams -------------------------------------------------------------------------------------------------


PRINTS = """
import os, sys
import torch, dtorch
mesh = dtorch.init_device_mesh("cpu", (2,))
def prints(rank):
    print("to stdout " * 300, flush=True)
    print("to stderr " * 300, file=sys.stderr, flush=True)
    return torch.ones(2)
for _ in range(20):
    value = dtorch.from_local(prints, mesh, [dtorch.Shard(0)], shape=(4,)).sum().item()
"""


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&-", "2>&-", "<&-"])
def test_closed_streams_are_nobody_elses(tmp_path: Path, closed: str) -> None:
    """Their numbers are not given to shared memory: what is written to "stderr" would land in the command ring. Nor to
    a file of the user's, which what executors print does not reach."""
    code = f"""
kept = open({str(tmp_path / "kept")!r}, "w")      # has the number of a stream that was closed
{PRINTS}
with open({str(tmp_path / "said")!r}, "w") as said:
    said.write(str(value) + " " + " ".join(os.readlink(f"/proc/self/fd/{{fd}}").partition(":")[0] for fd in range(3)))
"""
    ended = run(command=["sh", "-c", f'exec {sys.executable} -c "$CODE" {closed}'], env={"CODE": code})
    assert (ended.status, ended.left) == (0, []), ended.err
    value, *streams = (tmp_path / "said").read_text().split()
    assert value == "4.0" and not any("memfd" in s or "socket" in s or "anon_inode" in s for s in streams), streams
    assert (tmp_path / "kept").read_text() == ""


def test_a_stdin_that_ends_and_outputs_that_take_nothing() -> None:
    read, write = os.pipe()
    os.close(write)
    full_read, full = os.pipe()
    os.set_blocking(full, False)
    try:
        while True:
            os.write(full, bytes(4096))
    except BlockingIOError:
        os.set_blocking(full, True)
    with open("/dev/full", "w") as device:
        ended = run(PRINTS + "os._exit(int(value))", stdin=read, stdout=full, stderr=device)
    assert (ended.status, ended.left) == (4, [])
    for fd in (read, full_read, full):
        os.close(fd)


def test_streams_that_python_does_not_have() -> None:
    ended = run(
        "import sys\nout, sys.stdout, sys.stderr, sys.stdin = sys.stdout, None, None, None\n"
        f"{PRINTS}\nout.write(str(value))"
    )
    assert (ended.status, ended.left) == (0, [])
    assert ended.out.endswith("4.0")


# -- interpreters -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags", [["-I", "-W", "error"], ["-OO", "-B", "-bb"], ["-X", "dev"], ["-P", "-s", "-E", "-u"]]
)
def test_flags_of_the_interpreter(flags: list[str]) -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{USE}"
    assert outcome(run(command=[sys.executable, *flags, "-c", code], env={"PYTHONPATH": None})) == WORKS


def test_variables_of_others() -> None:
    """Those of torchrun, of OpenMP and of Python, all at once."""
    torchrun = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    python = {"PYTHONWARNINGS": "error", "PYTHONOPTIMIZE": "2", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONSAFEPATH": "1"}
    env = {**torchrun, **python, "OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3", "LC_ALL": "C", "PYTHONUTF8": "0"}
    assert outcome(run(USE, env=env)) == WORKS
    assert outcome(run(USE, env={**torchrun, "DTORCH_COLLECTIVES": "gloo", "GLOO_SOCKET_IFNAME": "none0"})) == WORKS


def test_places_that_a_script_may_come_from(tmp_path: Path) -> None:
    """A path with spaces and letters in a C locale; an archive; standard input; a cell of a notebook."""
    odd = tmp_path / "sp ace" / "ünï"
    odd.mkdir(parents=True)
    (odd / "scr ipt.py").write_text(USE)
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("__main__.py", USE)
    cell = f"exec(compile({USE!r}, '<ipython-input-1>', 'exec'), {{'__name__': '__main__'}})"
    with open(odd / "scr ipt.py") as stdin:
        assert outcome(run(command=[sys.executable, "-"], stdin=stdin)) == WORKS
    assert outcome(run(command=[sys.executable, odd / "scr ipt.py"], cwd=odd, env={"LC_ALL": "C"})) == WORKS
    assert outcome(run(command=[sys.executable, tmp_path / "app.zip"])) == WORKS
    assert outcome(run(cell)) == WORKS


def test_a_relative_search_path_is_what_it_was_when_it_was_used(tmp_path: Path) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/rows.py").write_text("import torch\ndef make(rank):\n    return torch.ones(2) * rank\n")
    ended = run(
        """
        import os, sys
        sys.path.insert(0, "modules")
        import rows
        os.chdir("/")
        import dtorch
        mesh = dtorch.init_device_mesh("cpu", (2,))
        print(dtorch.from_local(rows.make, mesh, [dtorch.Shard(0)], shape=(4,)).tolist())
        """,
        cwd=tmp_path,
    )
    assert outcome(ended) == (0, "[0.0, 0.0, 1.0, 1.0]\n", "", [])


def test_dtorch_in_an_archive_says_that_it_cannot(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as archive:
        for file in (ROOT / "dtorch").rglob("*.py"):
            archive.write(file, file.relative_to(ROOT))
    said = last_line(run(USE, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "packed.zip")}))
    assert re.search(r"packed\.zip/dtorch/executor/__main__\.py is no file, .*: unpack it, or install it", said)


# -- options ----------------------------------------------------------------------------------------------------------


def test_a_variable_that_cannot_be_read_is_one_line_at_first_use() -> None:
    ended = run("import dtorch\nprint('imported', flush=True)\ndtorch.ones(2)", env={"DTORCH_SLOTS": "many"})
    assert ended.out == "imported\n"
    assert last_line(ended).endswith("ConfigError: DTORCH_SLOTS='many': expected a whole number from 16 to 16777216")


def test_a_variable_that_sets_nothing_is_named_once() -> None:
    ended = run(TWO + "dtorch.restart(); print(value())", env={"DTORCH_COLECTIVES": "gloo"})
    assert (ended.status, ended.out, ended.left) == (0, "4.0\n", [])
    assert ended.err == "DTORCH_COLECTIVES is set, and dtorch has no such option; did you mean DTORCH_COLLECTIVES?\n"
