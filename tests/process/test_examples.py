"""The examples, run as their reader runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from .scripts import run_script

# Small enough for seconds; every kind of layer and both dropouts of the real one.
SMALL = ["--layers", 2, "--width", 32, "--heads", 4, "--context", 16, "--batch", 6, "--dropout", 0.1, "--sample", 0]
MESHES = {"one device": [], "dp": ["--dp", 2], "tp": ["--tp", 2], "dp and tp": ["--dp", 2, "--tp", 2]}


def curve(tmp_path: Path, *args: object) -> list[float]:
    """The losses that train_gpt.py reports, one per step."""
    out = tmp_path / "losses.txt"
    run_script("examples/train_gpt.py", *SMALL, "--plot", "", "--losses", out, *args)
    return [float(line) for line in out.read_text().splitlines()]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of its own: `--data`."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_bytes(b"".join(b"%d squared is %d.\n" % (i, i * i) for i in range(2000)))
    return path


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("dtype", "steps", "bound"), [("float32", 20, 1e-5), ("float64", 40, 1e-9)])
def test_all_meshes_draw_the_same_curve(tmp_path: Path, text: Path, dtype: str, steps: int, bound: float) -> None:
    curves = {
        name: curve(tmp_path, "--data", text, "--steps", steps, "--dtype", dtype, *mesh)
        for name, mesh in MESHES.items()
    }
    single = curves["one device"]
    assert len(single) == steps
    assert single[-1] < single[0] - 0.5, f"it does not learn: {single}"
    for name, losses in curves.items():
        worst = max(abs(a - b) for a, b in zip(losses, single, strict=True))
        assert worst <= bound, f"{name} is {worst:.2e} away from one device: {losses}"


def test_train_gpt_draws_its_curve_and_a_sample(tmp_path: Path) -> None:
    png = tmp_path / "curve.png"
    out = run_script("examples/train_gpt.py", *SMALL, "--steps", 5, "--dp", 2, "--sample", 20, "--plot", png)
    assert "step 5/5" in out
    assert "nats/byte" in out and "tokens/s" in out
    assert "--- what it writes after 16 bytes of the text:" in out
    assert png.exists() or "matplotlib is not installed" in out


def test_train_gpt_refuses_a_text_that_is_too_short(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(AssertionError, match="the text has 9 bytes, and --context 16 needs more than 17"):
        run_script("examples/train_gpt.py", *SMALL, "--data", tmp_path / "short.txt")
