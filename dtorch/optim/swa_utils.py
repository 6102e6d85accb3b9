"""``torch.optim.swa_utils``: averaged models, torch's as they are."""

from __future__ import annotations

from typing import Any

from torch.optim import swa_utils as _swa_utils
from torch.optim.swa_utils import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]


def __getattr__(name: str) -> Any:
    return getattr(_swa_utils, name)
