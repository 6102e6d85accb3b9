"""Options: where they come from, and what is said of those that cannot be read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtorch.errors import ConfigError
from dtorch.runtime import config
from dtorch.runtime.config import Config, configure, from_environ, unknown_variables, variable_of, variables


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(config, "_current", None)
    yield


def test_defaults() -> None:
    c = from_environ({})
    assert (c.run_ahead_soft, c.run_ahead_hard) == (50_000, 1_000_000)
    assert (c.plan_cache, c.watchdog, c.start_timeout) == (65_536, 60, 120)
    assert (c.same_device, c.same_device_count, c.blocking, c.collectives) == (False, 8, False, "shm")
    assert c.arena_limit == config.total_memory() // 4 // 4096 * 4096


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("DTORCH_RING_BYTES", "65536", "ring_bytes", 65536),
        ("DTORCH_RING_BYTES", "1M", "ring_bytes", 1 << 20),
        ("DTORCH_ARENA_BYTES", "2GiB", "arena_bytes", 2 << 30),
        ("DTORCH_ARENA_BYTES", " 512 kb", "arena_bytes", 512 << 10),
        ("DTORCH_CPU_EXECUTORS", "3", "cpu_executors", 3),
        ("DTORCH_WATCHDOG", "0.5", "watchdog", 0.5),
        ("DTORCH_WATCHDOG", "0", "watchdog", 0.0),
        ("DTORCH_BLOCKING", "1", "blocking", True),
        ("DTORCH_BLOCKING", "off", "blocking", False),
        ("DTORCH_COLLECTIVES", "GLOO", "collectives", "gloo"),
        ("DTORCH_DTENSOR_IN_SAME_DEVICE", "true", "same_device", True),
        ("DTORCH_DTENSOR_IN_SAME_DEVICE", "1", "same_device", True),
        ("DTORCH_NUM_GPU_WHEN_ENABLE_DTENSOR_IN_SAME_DEVICE", "16", "same_device_count", 16),
    ],
)
def test_environment(variable: str, text: str, name: str, value: object) -> None:
    got = getattr(from_environ({variable: text, "PATH": "/bin"}), name)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("DTORCH_SLOTS", "many", "a whole number from 16 to 16777216"),
        ("DTORCH_RING_BYTES", "1000", "a power of two from 4096 to 64 PiB (bytes)"),
        ("DTORCH_RING_BYTES", "12Q", "a power of two from 4096 to 64 PiB (bytes)"),
        ("DTORCH_RING_BYTES", "8388608T", "a power of two from 4096 to 64 PiB (bytes)"),
        ("DTORCH_ARENA_BYTES", "99999999T", "a whole number of bytes from 4096 to 64 PiB, or None"),
        ("DTORCH_COLLECTIVE_BYTES", "9" * 20, "a whole number of bytes from 1048576 to 64 PiB"),
        ("DTORCH_CPU_EXECUTORS", "0", "a whole number of at least 1, or None"),
        ("DTORCH_CPU_EXECUTORS", "2.5", "a whole number of at least 1, or None"),
        ("DTORCH_WATCHDOG", "-1", "seconds, 0 or more"),
        ("DTORCH_START_TIMEOUT", "soon", "seconds, more than 0"),
        ("DTORCH_BLOCKING", "maybe", "True or False"),
        ("DTORCH_COLLECTIVES", "nccl", '"shm" or "gloo"'),
        ("DTORCH_DTENSOR_IN_SAME_DEVICE", "2", "True or False"),
    ],
)
def test_what_cannot_be_read_is_one_line(variable: str, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_environ({variable: text})
    assert str(caught.value) == f"{variable}={text!r}: expected {expected}"


def test_bounds_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="expected soft <= hard"):
        from_environ({"DTORCH_RUN_AHEAD_SOFT": "2000000"})
    both = from_environ({"DTORCH_RUN_AHEAD_SOFT": "2000000", "DTORCH_RUN_AHEAD_HARD": "3000000"})
    assert (both.run_ahead_soft, both.run_ahead_hard) == (2_000_000, 3_000_000)


def test_configure_is_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTORCH_CPU_EXECUTORS", "3")
    monkeypatch.setenv("DTORCH_SLOTS", "99")
    assert config.current().cpu_executors == 3
    got = configure(cpu_executors=1, ring_bytes="2M")
    assert (got.cpu_executors, got.slots, got.ring_bytes) == (1, 99, 2 << 20)
    assert config.current() is got


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"executors": 2}, "configure() has no option 'executors'; the options are cpu_executors, "),
        ({"slots": "16"}, "slots='16': expected a whole number"),
        ({"slots": True}, "slots=True: expected a whole number"),
        ({"ring_bytes": "big"}, "ring_bytes='big': expected a power of two"),
        ({"run_ahead_hard": 5}, "run_ahead_soft=50000 is above run_ahead_hard=5"),
    ],
)
def test_configure_refuses_and_changes_nothing(options: dict[str, object], message: str) -> None:
    before = config.current()
    with pytest.raises(ConfigError) as caught:
        configure(**options)
    assert str(caught.value).startswith(message)
    assert config.current() is before


def test_a_variable_set_to_nothing_is_not_set() -> None:
    assert from_environ({"DTORCH_CPU_EXECUTORS": "", "DTORCH_BLOCKING": ""}) == Config()


# -- variables that set nothing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("DTORCH_COLECTIVES", "DTORCH_COLLECTIVES"),
        ("DTORCH_CPU_EXECUTERS", "DTORCH_CPU_EXECUTORS"),
        ("DTORCH_WATCH_DOG", "DTORCH_WATCHDOG"),
        ("DTORCH_DTENSOR_IN_SAME_DEVICES", "DTORCH_DTENSOR_IN_SAME_DEVICE"),
        ("DTORCH_XYZZY", ""),
    ],
)
def test_an_unknown_variable_and_what_was_meant(variable: str, meant: str) -> None:
    environ = {variable: "1", "DTORCH_SLOTS": "99", "DTORCH_TEST_SESSION": "1", "DTORCH_WIDE": "1", "TORCH_HOME": "/"}
    assert unknown_variables(environ) == {variable: meant}


def test_an_unknown_variable_is_named_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("DTORCH_COLECTIVES", "gloo")
    monkeypatch.setenv("DTORCH_XYZZY", "")
    assert config.current() is config.current()
    assert config.current() == Config()
    assert [r.getMessage() for r in caplog.records] == [
        "DTORCH_COLECTIVES is set, and dtorch has no such option; did you mean DTORCH_COLLECTIVES?",
        "DTORCH_XYZZY is set, and dtorch has no such option; python -m dtorch doctor lists the options",
    ]


def test_every_option_has_a_variable_and_every_variable_is_checked() -> None:
    """None is read as it comes: what no option takes is refused by all."""
    by_option = {option: variable for variable, option in variables().items()}
    assert set(by_option) == set(Config.__dataclass_fields__)
    for option, variable in by_option.items():
        assert variable_of(option) == variable
        with pytest.raises(ConfigError) as caught:
            from_environ({variable: "§"})
        text = str(caught.value)
        assert text.startswith(f"{variable}='§': expected ") and "\n" not in text


# -- memory -----------------------------------------------------------------------------------------------------------


def test_memory_is_the_least_of_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of groups further out hold as well, in both versions of control groups."""
    for where, name, value in [
        ("", "memory.max", "max"),
        ("user", "memory.max", str(3 << 30)),
        ("user/job", "memory.max", "max"),
        ("memory/docker", "memory.limit_in_bytes", str(5 << 30)),
    ]:
        (tmp_path / where).mkdir(parents=True, exist_ok=True)
        (tmp_path / where / name).write_text(value + "\n")
    groups = {"/proc/self/cgroup": "4:cpu,memory:/docker\n1:name=systemd:/x\n0::/user/job\n"}
    read = config._read
    monkeypatch.setattr(config, "_read", lambda path: groups.get(path) or read(path))
    monkeypatch.setattr(config, "_CGROUPS", str(tmp_path))
    assert config.cgroup_values("memory.max", "memory", "memory.limit_in_bytes") == [
        str(5 << 30), "max", str(3 << 30), "max",
    ]  # fmt: skip
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    config.total_memory.cache_clear()
    try:
        assert config.total_memory() == min(3 << 30, whole)
    finally:
        config.total_memory.cache_clear()
