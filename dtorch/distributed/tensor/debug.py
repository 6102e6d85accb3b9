"""``torch.distributed.tensor.debug``: who holds what of a tensor, as a picture in text; CommDebugMode."""

from __future__ import annotations

from ..._tensor import Tensor
from ...spec import TensorSpec
from .comm_mode import CommDebugMode

__all__ = ["CommDebugMode", "sharding_table", "visualize_sharding"]

Span = tuple[int, int]


def visualize_sharding(dtensor: Tensor, header: str = "", use_rich: bool = False) -> None:
    """Print which devices hold which part of a tensor of at most two dims.

    Args:
        dtensor: the tensor; its values are not looked at.
        header: a line above the picture.
        use_rich: accepted as torch's; the picture is plain text.

    Raises:
        ValueError: the tensor has more than two dims.
    """
    table = sharding_table(dtensor._spec)
    print(f"{header}\n{table}" if header else table)


def sharding_table(spec: TensorSpec) -> str:
    """The picture: a row and a column of the table for each cut, in each cell the devices that hold it.

    A device whose part is empty is named below the table; under a Partial placement the devices of a cell hold
    summands, which the first line says.
    """
    if spec.ndim > 2:
        raise ValueError(
            f"visualize_sharding: {spec.describe()} has {spec.ndim} dims, a picture has two; look at two of them, t[0]"
        )
    cells: dict[tuple[Span, Span], list[str]] = {}
    empty: list[str] = []
    for rank, id in enumerate(spec.mesh.ids):
        region = ((0, 1),) * (2 - spec.ndim) + spec.region(rank)
        device = f"{spec.mesh.device_type}:{id}"
        if all(length for _, length in region):
            cells.setdefault((region[0], region[1]), []).append(device)
        else:
            empty.append(device)
    rows, columns = (sorted({key[axis] for key in cells}) for axis in (0, 1))
    lines = [["", *(_range("col" if spec.ndim else "", c) for c in columns)]]
    for row in rows:
        held = [" ".join(cells.get((row, column), ["-"])) for column in columns]
        lines.append([_range("row" if spec.ndim == 2 else "", row), *held])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [f"{spec.describe()} on {spec.mesh.describe()}"]
    text += ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    if empty:
        text.append(f"nothing: {' '.join(empty)}")
    return "\n".join(text)


def _range(what: str, span: Span) -> str:
    start, length = span
    if not what:
        return ""
    return f"{what} {start}" if length == 1 else f"{what} {start}-{start + length - 1}"
