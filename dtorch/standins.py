"""One way of putting a function in the place of one of torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["stand_in"]


def stand_in(places: Sequence[Any], name: str, around: Callable[[Any], Any]) -> Any:
    """Put ``around(original)`` in the place of ``name`` in each of `places`, where the same function stands.

    Returns:
        What stands there now, its ``_dtorch_original`` being torch's; None where that was done before.
    """
    original = getattr(places[0], name)
    if hasattr(original, "_dtorch_original"):
        return None
    ours = around(original)
    ours._dtorch_original = original
    builtin = torch.jit._builtins._find_builtin(original)  # type: ignore[attr-defined]
    if builtin is not None:
        # TorchScript (forward-mode AD compiles with it) knows torch's functions by identity.
        torch.jit._builtins._register_builtin(ours, builtin)  # type: ignore[attr-defined]
    for place in places:
        setattr(place, name, ours)
    return ours
