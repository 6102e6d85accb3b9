"""``torch.optim.lr_scheduler``: schedules are plain Python on the client, torch's as they are."""

from __future__ import annotations

from typing import Any

from torch.optim import lr_scheduler as _lr_scheduler
from torch.optim.lr_scheduler import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]


def __getattr__(name: str) -> Any:
    return getattr(_lr_scheduler, name)
