"""``torch.nn.parameter``: a Parameter of a dtorch tensor is that tensor, marked."""

from torch.nn.parameter import (
    Buffer,
    Parameter,
    UninitializedBuffer,
    UninitializedParameter,
    UninitializedTensorMixin,  # pyright: ignore
    is_lazy,
)

__all__ = [
    "Buffer",
    "Parameter",
    "UninitializedBuffer",
    "UninitializedParameter",
    "UninitializedTensorMixin",
    "is_lazy",
]
