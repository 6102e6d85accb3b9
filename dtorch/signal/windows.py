"""``torch.signal.windows``, each made on a mesh: ``hann(8, device_mesh=mesh, placements=[Shard(0)])``."""

from __future__ import annotations

from typing import Any

from torch.signal import windows as _windows

from ..constants import here

__all__ = [*_windows.__all__]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'dtorch.signal.windows' has no attribute {name!r}")
    found = globals()[name] = here(f"signal.windows.{name}", getattr(_windows, name))
    return found


def __dir__() -> list[str]:
    return [*__all__]
