"""``torch.signal`` on meshes."""

from . import windows

__all__ = ["windows"]
