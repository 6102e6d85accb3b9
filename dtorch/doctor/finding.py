"""What a check says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

__all__ = ["Finding", "Report", "Status", "human"]

Status = Literal["ok", "warning", "wrong", "-"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        name: what was looked at.
        status: "ok"; "warning", it works but not as well as it could; "wrong", dtorch cannot work so; "-", for your
            information.
        text: what was found.
        fix: what to type; never empty where something is wrong.
    """

    name: str
    status: Status
    text: str
    fix: str = ""

    def __post_init__(self) -> None:
        if self.status == "wrong" and not self.fix:
            raise ValueError(f"{self.name} is wrong ({self.text}): say what to type")


@dataclass(slots=True)
class Report:
    """All findings by group, and all options."""

    head: str
    groups: dict[str, list[Finding]] = field(default_factory=dict[str, list[Finding]])
    options: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def add(self, group: str, findings: Iterable[Finding]) -> None:
        """Put `findings` at the end."""
        self.groups.setdefault(group, []).extend(findings)

    def count(self, status: Status) -> int:
        """How many findings have `status`."""
        return sum(f.status == status for findings in self.groups.values() for f in findings)

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON can say it."""
        return {
            "head": self.head,
            "ok": not self.count("wrong"),
            "wrong": self.count("wrong"),
            "warnings": self.count("warning"),
            "findings": [{"group": g, **asdict(f)} for g, findings in self.groups.items() for f in findings],
            "options": self.options,
        }


def human(nbytes: int) -> str:
    """A size as people write it: "64 MiB"."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"
