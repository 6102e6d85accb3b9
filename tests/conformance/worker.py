"""A process that tries operators, one after the other: it reads names, and writes a line of JSON for each.

    python -m tests.conformance.worker LEVEL SAMPLES COMBINATIONS SEED FD

One process of its own, so that an operator that kills it, or hangs, costs one line.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch

import dtorch

from .database import operators
from .levels import Limits, run


def main() -> None:
    level, cap, combinations, seed, fd = sys.argv[1:]
    torch.set_num_threads(1)
    limits = Limits(None if cap == "all" else int(cap), int(combinations), int(seed))
    every = operators()
    with os.fdopen(int(fd), "w") as out:
        for line in sys.stdin:
            name, started = line.strip(), time.monotonic()
            found = {"operator": name, "level": level, **run(level, every[name], limits).json()}
            found["seconds"] = round(time.monotonic() - started, 2)
            print(json.dumps(found), file=out, flush=True)
            if any(k.endswith("died") for k in found["counts"]):
                dtorch.restart()


if __name__ == "__main__":
    main()
