"""Awaitable forms of ``dtorch.save`` and ``dtorch.load``: see :mod:`dtorch.checkpoint.api`."""

from ..checkpoint.api import aio_load as load
from ..checkpoint.api import aio_save as save

__all__ = ["load", "save"]
