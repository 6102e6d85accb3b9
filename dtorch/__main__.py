"""``python -m dtorch``: what can be asked of dtorch from a shell."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

from .doctor import run as doctor
from .doctor.settings import document

USAGE = """\
usage: python -m dtorch doctor [--json] [--no-trial]
       python -m dtorch options

  doctor    check this machine, torch, the GPUs and every DTORCH_ variable, then start two executors, run an
            all_reduce and end them; says what is wrong and what to type. Exit status 1 if something is wrong
              --json      the same for programs
              --no-trial  start no executors
  options   every option with its variable, default and meaning, as Markdown
"""


def main(arguments: Sequence[str]) -> int:
    """Do what `arguments` ask for; the exit status."""
    text, status = USAGE, 2
    match list(arguments):
        case ["doctor", *flags] if set(flags) <= {"--json", "--no-trial"}:
            text, status = doctor(as_json="--json" in flags, trial="--no-trial" not in flags)
        case ["options"]:
            text, status = document(), 0
        case [] | ["-h" | "--help"] | ["doctor", "-h" | "--help"]:
            status = 0
        case _:
            print(f"dtorch: unknown: {' '.join(arguments)}", file=sys.stderr)
    say(text)
    return status


def say(text: str) -> None:
    """Print `text`. Where nobody reads, or stdout is closed, the exit status still tells."""
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]
        return
    try:
        # A terminal in the C locale still shows all there is, if not as it is.
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError):
            # Else Python tries again at its end, and complains.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
