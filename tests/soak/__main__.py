"""`python -m tests.soak`: see the package."""

from __future__ import annotations

import argparse
import sys

from . import __doc__ as about
from .driver import HEAD, conduct, table
from .parts import PARTS
from .worker import work


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    parser.add_argument("--seconds", type=float, default=1200.0, help="for all parts together (default: 1200)")
    parser.add_argument("--only", choices=names, action="append", help="these parts; the default is all")
    parser.add_argument("--seed", type=int, default=0, help="trial n of a part is made from seed + n")
    parser.add_argument("--count", type=int, help="trials of each part (default: a full run's)")
    parser.add_argument("--worker", type=int, metavar="FD", help=argparse.SUPPRESS)
    args = parser.parse_args()
    parts = [part for part in PARTS if args.only is None or part.name in args.only]
    if args.worker is not None:
        work(parts[0], args.seed, args.count, args.seconds, args.worker)
        return 0
    print(HEAD, flush=True)
    results = conduct(parts, args.seconds, args.seed, args.count)
    violations = sum(len(r.violations) for r in results)
    print(f"\n{table(results)}\n{violations} violation{'' if violations == 1 else 's'}.")
    return int(violations > 0)


if __name__ == "__main__":
    sys.exit(main())
