"""The parts of a soak: what each tries, how often, and within which bound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

__all__ = ["PARTS", "Part", "TrialsOf", "Violation"]


class Violation(AssertionError):
    """Something that was promised did not hold."""


class TrialsOf(Protocol):
    """What the module of a part has, as a class ``Trials`` without arguments."""

    def trial(self, seed: int) -> float | None:
        """Run one trial; its figure, where it has one, in the unit of the part's bound.

        Raises:
            Exception: something that was promised did not hold; a note or the message says what.
        """
        ...

    def close(self) -> Iterator[str | float]:
        """End what runs. What did not hold over all trials together, and figures that are of all together."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """One part.

    Attributes:
        name: of its module in this package, and on the command line.
        title: what is done, for the table.
        wanted: how many trials are a full run.
        weight: its share of the time, as against the others' weights.
        limit: seconds after which one trial hangs.
        figure: what is measured.
        bound: the most the figure may be; None where it is only told.
        unit: of the figure.
        each: how many things one trial does, where that is what is counted.
    """

    name: str
    title: str
    wanted: int
    weight: float
    limit: float
    figure: str
    bound: float | None
    unit: str
    each: int = 1


PARTS = [
    Part("executors", "kill -9 of an executor", 200, 6.0, 90, "until the last waiter knew", 1.0, "s"),
    Part("clients", "kill -9 of the client", 200, 6.0, 90, "until all was gone", 2.0, "s"),
    Part("programs", "random programs", 1000, 2.0, 120, "slowest program", None, "s"),
    Part("errors", "errors on one rank in collectives", 500, 2.0, 90, "until the next step was right", None, "s"),
    Part("operators", "operators", 100, 3.0, 120, "memory, last tenth over first", 4.0, "MB", each=10_000),
    Part("rings", "shared words written over", 150, 3.0, 90, "until it was told", 10.0, "s"),
    Part("checkpoints", "checkpoints spoilt or cut short", 100, 1.0, 90, "slowest ten", None, "s"),
    Part("decoders", "bytes that decoders are given", 100, 0.5, 90, "slowest hundred", None, "s", each=100),
]
