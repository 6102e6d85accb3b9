"""The kernel's part: what it offers, what it allows, and how much there is."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import resource
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ..executor.messages import close_all, receive, send
from ..runtime import config
from ..runtime.limits import descriptors_needed
from .finding import Finding, human
from .settings import in_force

__all__ = ["check_machine"]

_SECCOMP = "in a container, allow the call: docker run --security-opt seccomp=unconfined …"
# What one process of torch's own maps, on CPUs, besides the pool's memory.
_TORCH_ADDRESS_SPACE = 3 << 30
_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}


def check_machine() -> Iterator[Finding]:
    """All of it, the indispensable first."""
    yield _platform()
    for name, probe, said, fix in _PROBES:
        try:
            probe()
        except (OSError, ValueError, AttributeError) as error:
            yield Finding(name, "wrong", f"{said}: {error}", fix)
        else:
            yield Finding(name, "ok", said)
    yield from _limits()
    yield _shm()
    yield from _memory()
    yield from _cores()
    yield _temporary()


def _platform() -> Finding:
    text = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    if sys.platform != "linux":
        return Finding("system", "wrong", f"{text}: dtorch runs on Linux alone", "docker run -it python:3.12 bash")
    release = tuple(int(p) if p.isdigit() else 0 for p in platform.release().split("-")[0].split(".")[:2])
    if release < (5, 4):
        return Finding("system", "wrong", f"{text}: pidfds need Linux 5.4", "upgrade the kernel: uname -r")
    return Finding("system", "ok", text)


# -- calls of the kernel ----------------------------------------------------------------------------------------------


def _memfd() -> None:
    fd = os.memfd_create("dtorch-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, 1 << 20)
        with mmap.mmap(fd, 1 << 20) as one, mmap.mmap(fd, 1 << 20) as other:
            one[5] = 7
            if other[5] != 7:
                raise ValueError("a byte that one mapping wrote is not in the other")
    finally:
        os.close(fd)


def _eventfd() -> None:
    fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    try:
        with select.epoll() as epoll:
            epoll.register(fd, select.EPOLLIN | select.EPOLLET)
            os.eventfd_write(fd, 1)
            if not epoll.poll(1):
                raise ValueError("epoll does not tell of it")
    finally:
        os.close(fd)


def _pidfd() -> None:
    fd = os.pidfd_open(os.getpid())
    try:
        signal.pidfd_send_signal(fd, 0)
    finally:
        os.close(fd)


def _futex() -> None:
    number = _FUTEX.get(platform.machine())
    if number is None:
        raise ValueError(f"its number on {platform.machine()} is not known; collectives poll instead")
    word = ctypes.c_uint32(0)
    call = ctypes.CDLL(None, use_errno=True).syscall
    if call(number, ctypes.byref(word), 1, 1, None, None, 0) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _socket() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        send(ours, {"op": "hello"}, [ours.fileno()])
        message, fds = receive(theirs)
        close_all(fds)
        if message != {"op": "hello"} or len(fds) != 1:
            raise ValueError("a message with a descriptor did not arrive")


def _proc() -> None:
    Path("/proc/self/comm").read_text()
    for name in ("/proc/self/task", "/proc/self/fd"):
        os.listdir(name)


def _null() -> None:
    os.close(os.open(os.devnull, os.O_RDWR))


_PROBES: tuple[tuple[str, Callable[[], None], str, str], ...] = (
    ("memfd", _memfd, "anonymous shared memory, mapped twice", f"sysctl vm.memfd_noexec=0; {_SECCOMP}"),
    ("eventfd", _eventfd, "wake-ups, seen by epoll", _SECCOMP),
    ("pidfd", _pidfd, "processes watched by descriptor", _SECCOMP),
    ("futex", _futex, "waits in shared memory", _SECCOMP),
    ("socket pair", _socket, "descriptors passed to the warden", _SECCOMP),
    ("/proc", _proc, "mounted, shows this process", "mount -t proc proc /proc"),
    ("/dev/null", _null, "stands in for streams that are closed", "mknod -m 666 /dev/null c 1 3"),
)


# -- limits -----------------------------------------------------------------------------------------------------------


def _soft(limit: int) -> int | None:
    value = resource.getrlimit(limit)[0]
    return None if value == resource.RLIM_INFINITY else value


def _limits() -> Iterator[Finding]:
    options = in_force(os.environ)
    usual = options.cpu_executors or config.available_cores()
    need, most = descriptors_needed(min(usual, options.max_executors)), descriptors_needed(options.max_executors)
    files = _soft(resource.RLIMIT_NOFILE)
    fix = f"ulimit -n {max(1024, most)}"
    if files is not None and files < need:
        yield Finding("ulimit -n", "wrong", f"{files} open files: {usual} executors take about {need}", fix)
    elif files is not None and files < most:
        text = f"{files} open files: enough for {usual} executors; {options.max_executors} would take about {most}"
        yield Finding("ulimit -n", "warning", text, fix)
    else:
        yield Finding("ulimit -n", "ok", f"{files or 'unlimited'} open files: {options.max_executors} executors fit")

    processes = _soft(resource.RLIMIT_NPROC)
    # Each executor has, besides itself, the threads of torch; together about one a core.
    need = 1 + 2 * usual + config.available_cores()
    if processes is None:
        yield Finding("ulimit -u", "ok", "unlimited processes and threads")
    else:
        running = _tasks_of_user()
        # The superuser is not bound by it.
        free = processes - running if os.geteuid() else processes
        text = f"{processes} processes and threads, of which {running} run; {usual} executors take about {need}"
        bad = free < need
        yield Finding("ulimit -u", "wrong" if bad else "ok", text, f"ulimit -u {running + need + 1024}" if bad else "")

    wanted = options.arena_limit + options.collective_bytes + options.ring_bytes + _TORCH_ADDRESS_SPACE
    space = _soft(resource.RLIMIT_AS)
    if space is None:
        yield Finding("ulimit -v", "ok", "unlimited address space")
    else:
        bad = space < wanted
        text = f"{human(space)} of address space; a process of the pool maps about {human(wanted)}, most of it sparse"
        fix = "ulimit -v unlimited; or: export DTORCH_ARENA_BYTES=256M DTORCH_COLLECTIVE_BYTES=64M"
        yield Finding("ulimit -v", "wrong" if bad else "ok", text, fix if bad else "")

    size = _soft(resource.RLIMIT_FSIZE)
    largest = max(options.arena_limit, options.collective_bytes, options.ring_bytes)
    if size is not None and size < largest:
        text = f"{human(size)} a file, which shared memory counts as; the largest is {human(largest)}"
        yield Finding("ulimit -f", "wrong", text, "ulimit -f unlimited")
    locked = _soft(resource.RLIMIT_MEMLOCK)
    text = "unlimited" if locked is None else human(locked)
    yield Finding("ulimit -l", "-", f"{text} of locked memory; not needed: GPUs' drivers pin by themselves")


def _tasks_of_user() -> int:
    total, me = 0, os.getuid()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.stat().st_uid == me:
                total += len(os.listdir(process / "task"))
        except OSError:
            continue
    return total


# -- how much there is ------------------------------------------------------------------------------------------------


def _shm() -> Finding:
    try:
        stat = os.statvfs("/dev/shm")
        there = f"{human(stat.f_blocks * stat.f_frsize)}"
    except OSError:
        there = "none"
    return Finding("/dev/shm", "-", f"{there}; not needed: shared memory has no name and lies in no directory")


def _memory() -> Iterator[Finding]:
    options = in_force(os.environ)
    total = config.total_memory()
    free = total
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = min(total, int(line.split()[1]) << 10)
    except OSError:
        pass
    limits = config.cgroup_values("memory.max", "memory", "memory.limit_in_bytes")
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = min((int(v) for v in limits if v.isdigit()), default=machine)
    of = f", the limit of the control group on a machine of {human(machine)}" if limit < machine else ""
    text = f"{human(total)}{of}; {human(free)} available; the arena may take {human(options.arena_limit)}"
    low = free < min(options.arena_limit, 1 << 30)
    fix = "end other programs, or: export DTORCH_ARENA_BYTES=256M" if low else ""
    yield Finding("memory", "warning" if low else "ok", text, fix)
    try:
        strict = Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
    except OSError:
        strict = False
    if strict:
        yield Finding(
            "overcommit", "warning", "the kernel promises no more memory than there is; sparse files count in full",
            "sysctl vm.overcommit_memory=0, or: export DTORCH_ARENA_BYTES=256M DTORCH_COLLECTIVE_BYTES=64M",
        )  # fmt: skip


def _cores() -> Iterator[Finding]:
    cores, options = config.available_cores(), in_force(os.environ)
    busy = os.getloadavg()[0]
    executors = options.cpu_executors or cores
    threads = max(1, cores // executors)
    text = (
        f"{cores} of {os.cpu_count()} may be used, load {busy:.1f}; a lone executor uses {cores} threads of torch, "
        f"{executors} use {threads} each"
    )
    if busy >= cores:
        yield Finding("cores", "warning", f"{text}: other programs have them", "top  # and end what need not run")
    elif executors > cores:
        yield Finding(
            "cores", "warning", f"{text}: more executors than cores wait for each other",
            f"export DTORCH_CPU_EXECUTORS={cores}",
        )  # fmt: skip
    else:
        yield Finding("cores", "ok", text)
    quota = _quota()
    if quota is not None and quota < cores:
        whole = max(1, int(quota))
        yield Finding(
            "control group", "warning", f"the time of {quota:g} cores is allowed, and {cores} are seen",
            f"export DTORCH_CPU_EXECUTORS={whole} OMP_NUM_THREADS={whole}; or start with taskset -c 0-{whole - 1}",
        )  # fmt: skip


def _quota() -> float | None:
    """How many cores' time the control groups allow."""
    found = [v.split() for v in config.cgroup_values("cpu.max")]
    quotas = [int(q[0]) / int(q[1]) for q in found if len(q) == 2 and q[0].isdigit()]
    old = zip(
        config.cgroup_values("", "cpu", "cpu.cfs_quota_us"),
        config.cgroup_values("", "cpu", "cpu.cfs_period_us"),
        strict=False,
    )
    quotas += [int(quota) / int(period) for quota, period in old if quota.isdigit() and int(period)]
    return min(quotas, default=None)


def _temporary() -> Finding:
    needed = in_force(os.environ).collectives == "gloo"
    try:
        where = tempfile.gettempdir()
        with tempfile.TemporaryFile(dir=where) as file:
            file.write(b"x" * 4096)
    except OSError as error:
        text = f"no directory can be written: {error.strerror or error}"
        if needed:
            return Finding("temporary files", "wrong", f"{text}; gloo meets there", "export TMPDIR=/a/directory")
        return Finding("temporary files", "-", f"{text}; not needed: only gloo and NCCL meet in one")
    return Finding("temporary files", "ok" if needed else "-", f"{where} can be written; only gloo and NCCL use it")
