"""Conformance: torch's operator database through dtorch.

    python -m tests.conformance                     all levels, in full
    python -m tests.conformance --level B --only 'nn.functional' --samples 5
    python -m tests.conformance --slice 1/10        every tenth operator, and fewer samples: what CI runs

Writes a line of JSON per operator and level, and a summary. Fails where an operator fails that the expectations
(expectations.json) do not list, and where one passes that they do.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .report import judge, summarise, write_document
from .runner import Options, conduct


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--level", choices=["A", "B", "C"], action="append", help="the default is all three")
    parser.add_argument("--only", help="a regular expression: operators whose name it finds")
    parser.add_argument("--slice", default="1/1", help="k/n: every n-th operator, from the k-th")
    parser.add_argument("--samples", type=int, help="at most so many per operator and dtype (default: by level)")
    parser.add_argument("--combinations", type=int, help="of placements, per sample (default: by level)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("conformance.jsonl"))
    parser.add_argument("--write-document", action="store_true", help="write docs/conformance.md from a full run")
    parser.add_argument("--write-expectations", action="store_true", help="list what fails now; only to begin with")
    args = parser.parse_args()
    k, _, n = args.slice.partition("/")
    options = Options(
        tuple(args.level or ("A", "B", "C")), args.only, int(k) - 1, int(n), args.samples, args.combinations,
        args.seed, args.jobs,
    )  # fmt: skip
    lines = conduct(options, args.out)
    print(summarise(lines))
    if args.write_document:
        write_document(lines, options)
    return judge(lines, options, write=args.write_expectations)


if __name__ == "__main__":
    sys.exit(main())
