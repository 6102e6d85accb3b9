"""Files that are to be torch's and hold noise are refused in one line; what torch does not load, torch explains."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import pytest
import torch

import dtorch


@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
@pytest.mark.parametrize("head", [b"", b"\x80\x02", b"PK\x03\x04"])
def test_noise_is_refused_in_one_line(tmp_path: Path, head: bytes) -> None:
    lots = random.Random(0)
    path = tmp_path / "x.pt"
    for _ in range(150):
        path.write_bytes(head + lots.randbytes(lots.randint(0, 100)))
        with pytest.raises(dtorch.CheckpointError) as caught:
            dtorch.load(path)
        assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


@pytest.mark.parametrize("archive", [True, False])
def test_what_torch_does_not_load_by_default_is_left_to_torch(tmp_path: Path, archive: bool) -> None:
    torch.save({"a": slice(1, 2)}, tmp_path / "x.pt", _use_new_zipfile_serialization=archive)
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        dtorch.load(tmp_path / "x.pt")
    assert dtorch.load(tmp_path / "x.pt", weights_only=False) == {"a": slice(1, 2)}
