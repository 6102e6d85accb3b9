"""Every bound and default, in one frozen value.

A field is set by ``dtorch.configure(field=value)`` or, where that was not called, by the environment variable
``DTORCH_FIELD``. Sizes are bytes and may be written with a suffix: ``"64M"``, ``"2GiB"``. Times are seconds.

Bounds of the pool (executors, ring, arena, slots) are read when a pool starts; a running pool keeps its own.
"""

from __future__ import annotations

import difflib
import logging
import os
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

from ..errors import ConfigError

__all__ = [
    "Config",
    "available_cores",
    "cgroup_values",
    "configure",
    "current",
    "from_environ",
    "total_memory",
    "unknown_text",
    "unknown_variables",
    "variable_of",
    "variables",
]

_PREFIX = "DTORCH_"
# Names that the seed documents fixed before there was a scheme.
_ALIASES = {
    "DTORCH_DTENSOR_IN_SAME_DEVICE": "same_device",
    "DTORCH_NUM_GPU_WHEN_ENABLE_DTENSOR_IN_SAME_DEVICE": "same_device_count",
}
# Variables that say something to the tests, and nothing to the library.
_NOT_OPTIONS = ("DTORCH_WIDE", "DTORCH_PROGRAMS")
_NOT_OPTIONS_PREFIXES = ("DTORCH_TEST_", "DTORCH_SOAK")
_CGROUPS = "/sys/fs/cgroup"
_PAGE = 4096
# 64 PiB: more than any machine has addresses for, and few enough for the kernel to be asked.
_MOST_BYTES = 1 << 56

_log = logging.getLogger("dtorch")


def available_cores() -> int:
    """How many cores this process may run on."""
    return len(os.sched_getaffinity(0))


def _read(path: str) -> str:
    """What the small file at `path` holds; nothing where there is none."""
    try:
        with open(path) as f:
            return f.read().strip()
    except OSError:
        return ""


def cgroup_values(name: str, old_controller: str = "", old_name: str = "") -> list[str]:
    """What the files `name` hold of this process's control group and all that contain it, innermost first.

    `old_controller` and `old_name` are what the same is called in version 1 of control groups.
    """
    paths: list[str] = []
    # The roots besides: a container sees its own group there, by whatever name it goes outside.
    for line in [*_read("/proc/self/cgroup").splitlines(), "0::/", f"1:{old_controller}:/"]:
        _, controllers, path = line.split(":", 2)
        if controllers and old_controller not in controllers.split(","):
            continue
        root, file = (f"{_CGROUPS}/{old_controller}", old_name) if controllers else (_CGROUPS, name)
        parts = [part for part in path.split("/") if part]
        if file:
            paths += ["/".join([root, *parts[:n], file]) for n in range(len(parts), -1, -1)]
    return [text for text in map(_read, dict.fromkeys(paths)) if text]


@cache
def total_memory() -> int:
    """Bytes of memory this process may use: the machine's, or the limit of its control group or of its address space
    where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = cgroup_values("memory.max", "memory", "memory.limit_in_bytes")
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if address_space != resource.RLIM_INFINITY:
        limits.append(str(address_space))
    return min([total, *(int(text) for text in limits if text.isdigit())])


@dataclass(frozen=True, slots=True)
class Config:
    """All options. Make a changed copy with :func:`dataclasses.replace`; values are checked on construction.

    Attributes:
        cpu_executors: executors for a "cpu" mesh; ``None`` means min(ranks, cores).
        max_executors: most executors one pool can ever have.
        ring_bytes: size of the command ring, a power of two; sparse, so only what is unread takes memory.
        reply_bytes: size of each executor's reply ring, a power of two.
        arena_bytes: most shared memory for tensor payloads; ``None`` means a quarter of memory.
        pinned_bytes: how much of the arena each executor of a GPU pins, for the GPU to copy to and from; what lies
            beyond goes by way of buffers. 0 means nothing.
        collective_bytes: address space for shared-memory collectives; sparse.
        slots: most futures in flight at once.
        run_ahead_soft: commands an executor may be behind before awaits pause.
        run_ahead_hard: commands an executor may be behind before every call waits.
        plan_cache: cached dispatch plans, oldest out.
        watchdog: seconds one command may run before its executor is reported as stuck; 0 means never.
        start_timeout: seconds executors have to become ready.
        on_executor_death: "raise": every use of the pool raises until ``dtorch.restart()``. "restart": the next use
            after a death starts a fresh pool, see :func:`dtorch.on_restart`. What holds when executors die counts.
        max_restarts: how many pools may be started because of deaths within ``restart_window`` seconds. Further deaths
            are treated as "raise" says.
        restart_window: the seconds in which ``max_restarts`` counts.
        blocking: every call waits for its result and fails where it stands.
        collectives: "shm" (shared memory) or "gloo".
        executor_output: what becomes of lines that executors print. "forward": to this process's stdout and stderr, by
            the warden; "log": to the loggers ``dtorch.executor.<index>``, stdout as INFO and stderr as WARNING, when
            the program next waits for a value, or looks whether one is there; "quiet": nowhere.
        executor_prefix: whether each such line begins with the rank that wrote it.
        same_device: simulation; one executor hosts every rank of any mesh.
        same_device_count: how many devices the simulation has.
    """

    cpu_executors: int | None = None
    max_executors: int = 64
    ring_bytes: int = 64 << 20
    reply_bytes: int = 1 << 20
    arena_bytes: int | None = None
    pinned_bytes: int = 256 << 20
    collective_bytes: int = 2 << 30
    slots: int = 1 << 16
    run_ahead_soft: int = 50_000
    run_ahead_hard: int = 1_000_000
    plan_cache: int = 65_536
    watchdog: float = 60.0
    start_timeout: float = 120.0
    # Not of the pool, but of what follows it: pools that differ in nothing else are alike.
    on_executor_death: str = field(default="raise", compare=False)
    max_restarts: int = field(default=5, compare=False)
    restart_window: float = field(default=60.0, compare=False)
    blocking: bool = False
    collectives: str = "shm"
    executor_output: str = "forward"
    executor_prefix: bool = True
    same_device: bool = False
    same_device_count: int = 8

    def __post_init__(self) -> None:
        for name, (holds, wanted) in _BOUNDS.items():
            value = getattr(self, name)
            if not holds(value):
                raise ConfigError(f"{name}={value!r}: expected {wanted}")
        if self.run_ahead_soft > self.run_ahead_hard:
            raise ConfigError(
                f"run_ahead_soft={self.run_ahead_soft} is above run_ahead_hard={self.run_ahead_hard}: "
                "expected soft <= hard"
            )

    @property
    def arena_limit(self) -> int:
        """Bytes of the arena, a whole number of pages."""
        size = total_memory() // 4 if self.arena_bytes is None else self.arena_bytes
        return max(_PAGE, size // _PAGE * _PAGE)


def _whole(low: int, high: int | None = None) -> tuple[Callable[[Any], bool], str]:
    text = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
    return lambda v: type(v) is int and v >= low and (high is None or v <= high), text


def _bytes(low: int) -> tuple[Callable[[Any], bool], str]:
    return lambda v: type(v) is int and low <= v <= _MOST_BYTES, f"a whole number of bytes from {low} to 64 PiB"


def _power(low: int) -> tuple[Callable[[Any], bool], str]:
    return (
        lambda v: type(v) is int and low <= v <= _MOST_BYTES and v & (v - 1) == 0,
        f"a power of two from {low} to 64 PiB (bytes)",
    )


def _optional(bound: tuple[Callable[[Any], bool], str]) -> tuple[Callable[[Any], bool], str]:
    holds, text = bound
    return lambda v: v is None or holds(v), f"{text}, or None"


def _seconds(zero: bool) -> tuple[Callable[[Any], bool], str]:
    return (
        lambda v: type(v) in (int, float) and (v > 0 or (zero and v == 0)),
        "seconds, 0 or more" if zero else "seconds, more than 0",
    )


_FLAG: tuple[Callable[[Any], bool], str] = (lambda v: type(v) is bool, "True or False")

_BOUNDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "cpu_executors": _optional(_whole(1)),
    "max_executors": _whole(1, 1024),
    "ring_bytes": _power(1 << 12),
    "reply_bytes": _power(1 << 12),
    "arena_bytes": _optional(_bytes(_PAGE)),
    "pinned_bytes": _bytes(0),
    "collective_bytes": _bytes(1 << 20),
    "slots": _whole(16, 1 << 24),
    "run_ahead_soft": _whole(1),
    "run_ahead_hard": _whole(1),
    "plan_cache": _whole(1),
    "watchdog": _seconds(zero=True),
    "start_timeout": _seconds(zero=False),
    "on_executor_death": (lambda v: v in ("raise", "restart"), '"raise" or "restart"'),
    "max_restarts": _whole(1),
    "restart_window": _seconds(zero=False),
    "blocking": _FLAG,
    "collectives": (lambda v: v in ("shm", "gloo"), '"shm" or "gloo"'),
    "executor_output": (lambda v: v in ("forward", "log", "quiet"), '"forward", "log" or "quiet"'),
    "executor_prefix": _FLAG,
    "same_device": _FLAG,
    "same_device_count": _whole(1),
}

_SIZES = {"ring_bytes", "reply_bytes", "arena_bytes", "pinned_bytes", "collective_bytes"}
_SUFFIXES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


def _size(text: str) -> int:
    """Bytes of a size as people write it: 4096, "64M", "2GiB"."""
    low = text.strip().lower()
    digits = low.rstrip("kmgtib")
    unit = low[len(digits) :].removesuffix("ib").removesuffix("b")
    return int(digits) * _SUFFIXES[unit]


def _flag(text: str) -> bool:
    low = text.strip().lower()
    if low in _TRUE or low in _FALSE:
        return low in _TRUE
    raise ValueError(text)


def _parse(name: str, text: str) -> object:
    """The value that `text` writes down for the option `name`; KeyError or ValueError where it writes none."""
    kind = type(getattr(_DEFAULTS, name))
    if name in _SIZES:
        return _size(text)
    if kind is bool:
        return _flag(text)
    if kind is str:
        return text.strip().lower()
    return float(text) if kind is float else int(text)


_DEFAULTS = Config()
_NAMES = tuple(f.name for f in fields(Config))


def variables() -> dict[str, str]:
    """Environment variable → the option that it sets; where two set one, the later has the say."""
    return {_PREFIX + name.upper(): name for name in _NAMES} | _ALIASES


def from_environ(environ: Mapping[str, str]) -> Config:
    """The defaults, changed by the ``DTORCH_…`` variables of `environ`.

    Raises:
        ConfigError: a variable cannot be read; the one-line message says what it holds and what was expected.
    """
    values: dict[str, Any] = {}
    for variable, name in variables().items():
        text = environ.get(variable)
        if not text:  # set to nothing is not set
            continue
        holds, wanted = _BOUNDS[name]
        try:
            values[name] = _parse(name, text)
        except (KeyError, ValueError):
            raise ConfigError(f"{variable}={text!r}: expected {wanted}") from None
        if not holds(values[name]):
            raise ConfigError(f"{variable}={text!r}: expected {wanted}")
    # Only now: bounds that concern two options hold for both as they end up.
    return replace(_DEFAULTS, **values)


def variable_of(name: str) -> str:
    """The environment variable that sets the option `name`."""
    aliased = {option: variable for variable, option in _ALIASES.items()}
    return aliased.get(name, _PREFIX + name.upper())


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """``DTORCH_…`` variables of `environ` that set no option → the one that may have been meant, or ""."""
    known = {v.removeprefix(_PREFIX): v for v in variables()}
    found: dict[str, str] = {}
    for variable in sorted(v for v in environ if v.startswith(_PREFIX)):
        name = variable.removeprefix(_PREFIX)
        if name not in known and variable not in _NOT_OPTIONS and not variable.startswith(_NOT_OPTIONS_PREFIXES):
            close = difflib.get_close_matches(name, known, 1)
            found[variable] = known[close[0]] if close else ""
    return found


def unknown_text(variable: str, meant: str) -> str:
    """One line on a variable that sets nothing."""
    hint = f"did you mean {meant}?" if meant else "python -m dtorch doctor lists the options"
    return f"{variable} is set, and dtorch has no such option; {hint}"


# Set in an executor: a program that runs there has no pool of its own.
inside_executor = False

_current: Config | None = None


def current() -> Config:
    """The options in force: those of :func:`configure`, over the environment's, over the defaults."""
    global _current
    if _current is None:
        _current = from_environ(os.environ)
        for variable, meant in unknown_variables(os.environ).items():
            _log.warning(unknown_text(variable, meant))
    return _current


def configure(**options: object) -> Config:
    """Change options for everything that starts from now on, and return all that are then in force.

    A pool that is already running keeps the bounds it was started with; ``dtorch.restart()`` gives one with the new.

    Raises:
        ConfigError: an option is unknown, or its value is out of bounds. Nothing has changed then.
    """
    global _current
    unknown = sorted(set(options) - set(_NAMES))
    if unknown:
        raise ConfigError(f"configure() has no option {unknown[0]!r}; the options are {', '.join(_NAMES)}")
    for name in _SIZES & set(options):
        value = options[name]
        if isinstance(value, str):
            try:
                options[name] = _size(value)
            except (KeyError, ValueError):
                raise ConfigError(f"{name}={value!r}: expected {_BOUNDS[name][1]}") from None
    _current = replace(current(), **options)  # type: ignore[arg-type]
    return _current
