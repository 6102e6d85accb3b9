"""Limits of this process: what the one that was met is called, where it stands, and what to type to raise it."""

from __future__ import annotations

import errno
import resource

__all__ = ["LIMITS", "descriptors_needed", "explain", "shown"]

# errno → (the shell's letter, the limit, what it counts, bytes of the shell's unit)
LIMITS: dict[int, tuple[str, int, str, int]] = {
    errno.EMFILE: ("n", resource.RLIMIT_NOFILE, "open descriptors", 1),
    errno.EAGAIN: ("u", resource.RLIMIT_NPROC, "processes and threads of this user", 1),
    errno.ENOMEM: ("v", resource.RLIMIT_AS, "KiB of address space", 1024),
    errno.EFBIG: ("f", resource.RLIMIT_FSIZE, "blocks of 512 bytes a file", 512),
}
_OTHERWISE = {
    errno.EAGAIN: "the control group's pids.max or the kernel's threads-max was met",
    errno.ENOMEM: "memory ran out, or the kernel may not overcommit (vm.overcommit_memory=2): "
    "dtorch.configure(arena_bytes='1G', collective_bytes='64M') asks for less",
    errno.ENFILE: "the machine's fs.file-max was met",
}
_SMALLER = {
    errno.ENOMEM: "; or ask for less: dtorch.configure(arena_bytes='256M', collective_bytes='64M')",
    errno.EFBIG: "; shared memory counts as files: the largest are arena_bytes and collective_bytes",
}


def descriptors_needed(executors: int) -> int:
    """About how many descriptors the client, or the warden, has open for a pool of `executors`, with some to spare."""
    return 40 + 6 * executors


def shown(limit: int, unit: int = 1) -> str:
    """The soft limit number `limit` as ``ulimit`` prints it."""
    soft = resource.getrlimit(limit)[0]
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft // unit)


def explain(error: OSError, executors: int = 1) -> str:
    """`error` in one line, and the limit behind it, if there is one, with what `executors` executors need."""
    number = error.errno or 0
    if number not in LIMITS:
        return f"{error}; {_OTHERWISE[number]}" if number in _OTHERWISE else str(error)
    letter, limit, counts, unit = LIMITS[number]
    now = shown(limit, unit)
    if now == "unlimited":
        return f"{error}; {_OTHERWISE.get(number, 'no limit of this process is the cause')}"
    need = descriptors_needed(executors)
    wanted = f"{max(1024, need)}" if number == errno.EMFILE else "unlimited"
    takes = f", and a pool of {executors} takes about {need}" if number == errno.EMFILE else ""
    fix = f"raise it: ulimit -{letter} {wanted}{_SMALLER.get(number, '')}"
    return f"{error}; the limit (ulimit -{letter}) is {now} {counts}{takes}; {fix}"
