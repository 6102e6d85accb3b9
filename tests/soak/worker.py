"""The process that runs the trials of one part, and tells of each by a line of JSON."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import traceback
import warnings
from typing import Any

from ..conftest import MARKER
from .parts import Part, TrialsOf

__all__ = ["work"]


def work(part: Part, first: int, count: int, seconds: float, report: int) -> None:
    """Run `count` trials from seed `first` on, or as many as begin within `seconds`, one at least.

    What becomes of them is told to the descriptor `report`, a line of JSON each: {"begin": seed},
    {"seed": seed, "figure": …, "violation": …}, and at last {"end": [violations and figures of all together]}.
    """
    # What is started from here on can be found by it: see conftest.started_here.
    os.environ[MARKER] = str(os.getpid())
    os.set_inheritable(report, False)
    # The driver's way to see where a trial hangs.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    warnings.simplefilter("ignore")

    def tell(**line: Any) -> None:
        os.write(report, (json.dumps(line) + "\n").encode())

    deadline = time.monotonic() + seconds  # what the part needs to begin is part of it
    trials: TrialsOf = importlib.import_module(f"{__package__}.{part.name}").Trials()
    for seed in range(first, first + count):
        if seed > first and time.monotonic() > deadline:
            break
        tell(begin=seed)
        faulthandler.dump_traceback_later(part.limit, exit=True)
        violation = figure = None
        try:
            figure = trials.trial(seed)
        except Exception as error:
            violation = "".join(traceback.format_exception(error))
        faulthandler.cancel_dump_traceback_later()
        tell(seed=seed, figure=figure, violation=violation)
    faulthandler.dump_traceback_later(part.limit, exit=True)
    tell(end=list(trials.close()))
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
