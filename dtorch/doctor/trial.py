"""Two executors, started, used and ended: what all other checks are guesses about."""

from __future__ import annotations

from collections.abc import Iterator

from .finding import Finding, Report
from .probe import ask

__all__ = ["check_trial"]


def check_trial(report: Report) -> Iterator[Finding]:
    """Start, add, all_reduce, end, each with its time. `report` says what to mend first, should it fail."""
    found = ask("try_pool", timeout=300.0)
    if "error" in found:
        before = [f.name for findings in report.groups.values() for f in findings if f.status == "wrong"]
        fix = (
            f"mend first: {', '.join(before)}"
            if before
            else "python -X faulthandler -c 'import dtorch; dtorch.restart()'"
        )
        yield Finding("start", "wrong", found["error"], fix)
        return
    t = found["times"]
    yield Finding("start", "ok", f"{found['executors']} executors and a warden in {t['start']:.2f} s")
    for name, first, rest in (("add", "first_add", "adds"), ("all_reduce", "first_all_reduce", "all_reduces")):
        times = f"first {t[first] * 1e3:.1f} ms, then {t[rest] * 1e4:.0f} µs each, asked for and fetched"
        if found[name]:
            yield Finding(name, "ok", times)
        else:
            yield Finding(name, "wrong", f"gave a wrong value; {times}", "pip install --force-reinstall torch")
    if found["left"]:
        pids = " ".join(map(str, found["left"]))
        yield Finding("end", "wrong", f"processes are left after {t['end']:.2f} s: {pids}", f"kill -9 {pids}")
    else:
        yield Finding("end", "ok", f"in {t['end']:.3f} s; no process is left")
