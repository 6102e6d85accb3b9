"""Whether dtorch can work here, and what to type where it cannot: ``python -m dtorch doctor``.

    finding.py   what a check says
    machine.py   the kernel's part: memfd, futexes, /proc, limits, memory, cores
    software.py  torch, its GPUs, and the packages beside it
    settings.py  options and the variables that set them
    trial.py     two executors: started, used, ended

Nothing here imports torch into this process, which must be able to say that torch crashes on import: whatever needs it
runs in a process of its own (probe.py), which is also the only one that ever initialises CUDA.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time

from .. import __version__
from .finding import Finding, Report
from .machine import check_machine
from .settings import check_variables, option_lines, options
from .software import check_gpus, check_packages, check_torch
from .trial import check_trial

__all__ = ["Finding", "Report", "examine", "render", "run"]

_WIDTH = 18


def examine(*, trial: bool = True) -> Report:
    """Run all checks; takes some seconds, most of it torch's import."""
    report = Report(
        head=f"dtorch {__version__}, Python {platform.python_version()} ({sys.executable}), "
        f"{platform.system()} {platform.release()}, {platform.machine()}"
    )
    report.add("this machine", check_machine())
    found, facts = check_torch()
    report.add("torch", found)
    report.add("GPUs", check_gpus(facts))
    report.add("packages", check_packages())
    report.add("variables", check_variables(os.environ))
    report.options = options(os.environ)
    if trial:
        report.add("trial of 2 executors", check_trial(report))
    return report


def render(report: Report) -> str:
    """The table that a person reads."""
    lines = [report.head]
    for group, findings in report.groups.items():
        lines += ["", group]
        for f in findings:
            lines.append(f"  {f.status:<8}{f.name:<{_WIDTH}} {f.text}")
            if f.fix:
                lines.append(f"  {'':<8}{'':<{_WIDTH}} → {f.fix}")
    lines += ["", "options (dtorch.configure(name=value), or the variable)"]
    lines += [f"  {line}" for line in option_lines(report.options)]
    wrong, warnings = report.count("wrong"), report.count("warning")
    verdict = "All is well." if not wrong else f"{wrong} wrong: dtorch cannot work here as it is."
    if warnings:
        verdict += f" {warnings} warning{'s' if warnings > 1 else ''}."
    return "\n".join([*lines, "", verdict]) + "\n"


def run(*, as_json: bool, trial: bool) -> tuple[str, int]:
    """The report as text, and the exit status: 1 if something is wrong."""
    began = time.monotonic()
    report = examine(trial=trial)
    status = 1 if report.count("wrong") else 0
    if as_json:
        seconds = round(time.monotonic() - began, 3)
        return json.dumps({**report.as_json(), "seconds": seconds}, indent=2) + "\n", status
    return render(report), status
