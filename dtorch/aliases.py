"""``import dtorch.utils.benchmark``: a module that dtorch has not, and torch has, is torch's own under both names."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["install"]

# What dtorch has its own half of: a module missing there must not be torch's.
_OWN = ("distributed",)


class _Aliases:
    """A finder, asked last: dtorch's own files come first."""

    @staticmethod
    def find_spec(fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        names = rest.split(".")
        if package != __package__ or not rest or names[0] in _OWN or any(n.startswith("_") for n in names):
            return None
        try:
            found = importlib.util.find_spec(f"torch.{rest}")
        except ModuleNotFoundError:
            return None
        if found is None:
            return None
        return ModuleSpec(fullname, _Loader, is_package=found.submodule_search_locations is not None)  # type: ignore[arg-type]


class _Loader:
    """Puts torch's module where Python looks for dtorch's."""

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        return None

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        name = module.__name__
        # torch's functions meet dtorch tensors only where these are known.
        importlib.import_module("dtorch.factories")
        sys.modules[name] = importlib.import_module("torch." + name.partition(".")[2])


def install() -> None:
    """Ask the finder, after all others."""
    if _Aliases not in sys.meta_path:
        sys.meta_path.append(_Aliases)  # type: ignore[arg-type]
