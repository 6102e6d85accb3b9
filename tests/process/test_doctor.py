"""`python -m dtorch`: what it says of this machine, of broken ones, and where nobody reads it."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtorch.doctor import Finding, Report, render
from dtorch.doctor.settings import document, option_lines, options
from dtorch.doctor.software import check_gpus
from dtorch.runtime.config import Config

from .namespaces import in_namespace, over
from .scripts import ROOT


def dtorch_m(
    *arguments: str, path: Path | None = None, limit: Callable[[], None] | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """`python -m dtorch` with `arguments`; `path` is searched before all else."""
    search = os.pathsep.join([*([str(path)] if path else []), str(ROOT)])
    others = {k: v for k, v in os.environ.items() if not k.startswith("DTORCH_") or k.startswith("DTORCH_TEST_")}
    return subprocess.run(
        [sys.executable, "-m", "dtorch", *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        preexec_fn=limit,
        env={**others, "PYTHONPATH": search, **env},
    )


def found(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    """Name → finding, of ``doctor --json``."""
    return {f["name"]: f for f in json.loads(done.stdout)["findings"]}


@pytest.mark.parametrize(
    ("arguments", "status"), [([], 0), (["--help"], 0), (["doktor"], 2), (["doctor", "--yaml"], 2)]
)
def test_usage(arguments: list[str], status: int) -> None:
    done = dtorch_m(*arguments)
    assert done.returncode == status
    assert done.stdout.startswith("usage: python -m dtorch doctor [--json] [--no-trial]\n")
    assert done.stderr == (f"dtorch: unknown: {' '.join(arguments)}\n" if status else "")


def test_here_all_is_well() -> None:
    done = dtorch_m("doctor", "--json")
    said = json.loads(done.stdout)
    wrong = [f for f in said["findings"] if f["status"] == "wrong"]
    assert (done.returncode, said["ok"], wrong, done.stderr) == (0, True, [], "")
    about = found(done)
    for name in ("memfd", "eventfd", "pidfd", "futex", "socket pair", "/proc", "torch", "build", "gloo", "numpy"):
        assert about[name]["status"] == "ok", about[name]
    assert "not needed" in about["/dev/shm"]["text"]
    assert about["start"]["text"].startswith("2 executors and a warden in ")
    for name in ("add", "all_reduce"):
        assert re.fullmatch(r"first [\d.]+ ms, then \d+ µs each, asked for and fetched", about[name]["text"])
    assert about["end"]["text"].endswith("no process is left")
    assert [o["name"] for o in said["options"]] == list(Config.__dataclass_fields__)
    assert {o["source"] for o in said["options"]} == {"default"}


def test_the_table() -> None:
    done = dtorch_m("doctor", "--no-trial", DTORCH_RING_BYTES="1M", DTORCH_COLECTIVES="gloo", DTORCH_SLOTS="many")
    out = done.stdout
    assert done.returncode == 1 and done.stderr == ""
    assert re.search(r"(?m)^  wrong   DTORCH_SLOTS +DTORCH_SLOTS='many': expected a whole number from 16 to \d+$", out)
    assert re.search(r"(?m)^ +→ unset DTORCH_SLOTS$", out)
    assert re.search(r"(?m)^  warning DTORCH_COLECTIVES .* did you mean DTORCH_COLLECTIVES\?$", out)
    assert re.search(r"(?m)^ +→ unset DTORCH_COLECTIVES; export DTORCH_COLLECTIVES=gloo$", out)
    assert re.search(r"(?m)^  ok      DTORCH_RING_BYTES +'1M' sets ring_bytes$", out)
    assert re.search(r"(?m)^  -       DTORCH_TEST_SESSION +.* for the tests alone$", out)
    assert re.search(r"(?m)^1 wrong: dtorch cannot work here as it is\. \d warnings?\.\Z", out.rstrip("\n"))


def test_an_option_and_where_it_is_from() -> None:
    by_name = {o["name"]: o for o in options({"DTORCH_RING_BYTES": "1M", "DTORCH_DTENSOR_IN_SAME_DEVICE": "1"})}
    ring = by_name["ring_bytes"]
    assert (ring["value"], ring["source"], ring["default"]) == (1 << 20, "DTORCH_RING_BYTES", 64 << 20)
    assert ring["meaning"].startswith("size of the command ring, a power of two")
    assert (by_name["same_device"]["value"], by_name["same_device"]["source"]) == (
        True,
        "DTORCH_DTENSOR_IN_SAME_DEVICE",
    )
    assert by_name["slots"]["source"] == "default"
    assert all(o["meaning"] for o in by_name.values())
    lines = option_lines(list(by_name.values()))
    assert any(
        re.fullmatch(r"ring_bytes +1MiB +from DTORCH_RING_BYTES size of the command ring, a .*", x) for x in lines
    )


def test_the_page_of_options_is_what_the_options_are() -> None:
    assert (ROOT / "docs/options.md").read_text() == document(), "write: python -m dtorch options > docs/options.md"
    assert dtorch_m("options").stdout == document()


def test_two_variables_that_contradict_each_other() -> None:
    done = dtorch_m("doctor", "--json", "--no-trial", DTORCH_RUN_AHEAD_SOFT="20", DTORCH_RUN_AHEAD_HARD="10")
    together = found(done)["together"]
    assert done.returncode == 1
    assert "run_ahead_soft=20 is above run_ahead_hard=10" in together["text"]
    assert together["fix"] == "unset DTORCH_RUN_AHEAD_SOFT DTORCH_RUN_AHEAD_HARD"


# -- broken machines --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "raise ImportError('libtorch_cpu.so: cannot open shared object file')",
            "ImportError: libtorch_cpu.so: cannot",
        ),
        ("import os; os.abort()", "the process ended with signal 6"),
        ("raise SystemExit(3)", "the process ended with exit status 3"),
    ],
)
def test_a_broken_torch(tmp_path: Path, source: str, text: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(source)
    done = dtorch_m("doctor", "--json", path=tmp_path)
    about = found(done)
    assert done.returncode == 1 and done.stderr == ""
    assert about["torch"]["status"] == "wrong" and text in about["torch"]["text"]
    assert about["torch"]["fix"].startswith("pip install ")
    assert about["start"]["status"] == "wrong" and about["start"]["fix"] == "mend first: torch"
    assert about["GPUs"]["status"] == "-"


def test_no_torch() -> None:
    code = (
        "import sys, importlib.abc, runpy\n"
        "class Missing(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'msgspec'): raise ModuleNotFoundError(name)\n"
        "import importlib.util as u\n"
        "real = u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name in ('torch', 'msgspec') else real(name, package)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "sys.argv = ['dtorch', 'doctor', '--json', '--no-trial']\n"
        "runpy.run_module('dtorch', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    about = found(done)
    assert done.returncode == 1, done.stderr
    assert about["torch"]["text"] == "not installed for this Python"
    assert about["torch"]["fix"] == "pip install --upgrade 'torch>=2.11'"
    assert about["msgspec"]["status"] == "wrong" and about["msgspec"]["fix"].startswith("pip install 'msgspec")


def test_limits_that_are_too_low() -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    done = dtorch_m("doctor", "--json", "--no-trial", limit=limit)
    about = found(done)
    assert done.returncode == 1
    assert about["ulimit -n"]["status"] == "wrong"
    assert re.match(r"40 open files: \d+ executors take about \d+", about["ulimit -n"]["text"])
    assert re.fullmatch(r"ulimit -n \d+", about["ulimit -n"]["fix"])
    assert about["ulimit -f"]["fix"] == "ulimit -f unlimited"


def test_a_read_only_file_system_and_no_proc() -> None:
    mounts = over("ro", "/tmp", "/dev/shm", "/proc")
    command = in_namespace(mounts, [sys.executable, "-m", "dtorch", "doctor", "--json", "--no-trial"])
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": "/nonexistent", "TMPDIR": "/tmp"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, cwd="/", env=env)
    assert done.returncode == 1, done.stderr
    about = found(done)
    assert about["/proc"]["status"] == "wrong" and about["/proc"]["fix"] == "mount -t proc proc /proc"
    assert about["memfd"]["status"] == "ok"


# -- where nobody reads -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("redirection", [">&-", ">&- 2>&-", "> /dev/full", "| true"])
def test_where_nobody_reads_the_status_still_tells(redirection: str) -> None:
    for variable, status in (("DTORCH_TEST_NOTHING", 0), ("DTORCH_SLOTS", 1)):
        command = f"{{ {sys.executable} -m dtorch doctor --no-trial; echo $? >&3; }} 3>&9 {redirection}"
        read, write = os.pipe()
        try:
            shell = f"exec 9>&{write}; {command}"
            done = subprocess.run(
                ["bash", "-c", shell],
                capture_output=True,
                text=True,
                pass_fds=(write,),
                env={**os.environ, "PYTHONPATH": str(ROOT), variable: "x"},
            )
            os.close(write)
            write = -1
            assert os.read(read, 10) == f"{status}\n".encode()
            assert done.stderr == ""
        finally:
            os.close(read)
            if write >= 0:
                os.close(write)


# -- findings ---------------------------------------------------------------------------------------------------------


def test_what_is_wrong_has_a_fix() -> None:
    with pytest.raises(ValueError, match="say what to type"):
        Finding("memfd", "wrong", "not there")


def test_the_verdict_counts() -> None:
    report = Report("head")
    report.options = options({})
    report.add("group", [Finding("a", "ok", "fine"), Finding("b", "warning", "slow"), Finding("c", "warning", "odd")])
    assert render(report).endswith("\nAll is well. 2 warnings.\n")
    report.add("group", [Finding("d", "wrong", "broken", "mend it")])
    assert render(report).endswith("\n1 wrong: dtorch cannot work here as it is. 2 warnings.\n")
    assert "  wrong   d                  broken\n" + " " * 29 + "→ mend it\n" in render(report)


def gpu(**changes: Any) -> dict[str, Any]:
    return {
        "name": "NVIDIA H100",
        "capability": "sm_90",
        "free": 70 << 30,
        "total": 80 << 30,
        "computes": True,
        "peers": [1],
        **changes,
    }


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ({"gpus": [gpu()], "driver": 12040, "nccl": "2.27.3"}, {"driver": "ok", "cuda:0": "ok", "NCCL": "ok"}),
        ({"gpus": [gpu()], "driver": 11080, "nccl": ""}, {"driver": "wrong"}),
        ({"gpus": [gpu(free=1 << 30)], "driver": 12080, "nccl": ""}, {"cuda:0": "warning"}),
        ({"gpus": [gpu(), gpu(peers=[])], "driver": 12080, "nccl": ""}, {"peer access": "ok", "NCCL": "warning"}),
        ({"gpus": [gpu(peers=[]), gpu(peers=[])], "driver": 12080, "nccl": "2.27"}, {"peer access": "warning"}),
        ({"gpus": [], "driver": 0, "nccl": ""}, {"GPUs": "-"}),
        ({"error": "CUDA error 999"}, {"GPUs": "-"}),
    ],
)
def test_gpus(monkeypatch: pytest.MonkeyPatch, about: dict[str, Any], expected: dict[str, str]) -> None:
    monkeypatch.setattr("dtorch.doctor.software.ask", lambda what: {"built_for": ["sm_90"], **about})
    findings = {f.name: f for f in check_gpus({"cuda": "12.6"})}
    assert {name: findings[name].status for name in expected} == expected
    if "driver" in expected and expected["driver"] == "wrong":
        assert findings["driver"].text == "serves CUDA 11.8, and torch is built for 12.6"
        assert findings["driver"].fix.endswith("/whl/cu118")
