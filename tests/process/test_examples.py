"""The examples, run as their reader runs them."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch

from .scripts import ROOT, run_script

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


ASYNC = [*SMALL[:-2], "--steps", 60, "--eval-every", 20, "--eval-batches", 2, "--checkpoint-every", 25]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("mesh", "backend"), [(["--dp", 2], "asyncio"), (["--tp", 2], "trio")])
def test_train_async_learns_while_it_evaluates_saves_and_answers(
    tmp_path: Path, text: Path, mesh: list[object], backend: str
) -> None:
    saved = tmp_path / "gpt.pt"
    options = [*ASYNC, *mesh, "--backend", backend, "--data", text, "--checkpoint", saved]
    command = [sys.executable, str(ROOT / "examples/train_async.py"), *map(str, options)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    seen: list[dict[str, float]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as process:
        assert process.stdout is not None
        out, url = "", None
        for line in process.stdout:
            out += line
            found = re.match(r"metrics at (http://127\.0\.0\.1:\d+/metrics)", line)
            url = found[1] if found else url
            if url is None:
                continue
            # At every line of progress: how training stands at this moment. It may end while it is asked.
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=60) as response:
                rows = [row.split() for row in response.read().decode().splitlines()]
                seen.append({name: float(value) for name, value in rows})
        assert process.wait() == 0, out
    steps = [int(m["train_steps_total"]) for m in seen]
    assert steps == sorted(steps) and steps[0] < steps[-1] <= 60 and len(seen) >= 4, steps
    assert any(m["evaluations_total"] > 0 for m in seen) and any(m["train_loss_nats"] > 0 for m in seen)

    report = re.search(r"loss (\S+) → (\S+), on unseen text (\S+) nats/byte; 3 evaluations, 3 checkpoints", out)
    assert report, out
    first, last, unseen = map(float, report.groups())
    assert last < first - 0.5, f"it does not learn: {out}"
    assert [p.name for p in tmp_path.iterdir()] == ["gpt.pt"]

    # What was saved last is the model that was evaluated last: plain torch finds the same loss with it.
    gpt = runpy.run_path(str(ROOT / "examples/gpt.py"))
    model = gpt["load"](str(saved)).eval()
    assert all(type(t) is torch.Tensor for t in torch.load(saved, weights_only=True)["model"].values())
    whole = gpt["read_text"](str(text))
    stream = gpt["batches"](whole[-(len(whole) // 10) :], 6, 16, seed=1)
    losses = [
        torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) for x, y in (next(stream), next(stream))
    ]
    assert sum(losses).item() / 2 == pytest.approx(unseen, abs=1e-5)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_train_async_ends_quietly_at_ctrl_c(tmp_path: Path, text: Path, backend: str) -> None:
    saved = tmp_path / "gpt.pt"
    options = [*ASYNC, "--steps", 100_000, "--dp", 2, "--backend", backend, "--data", text, "--checkpoint", saved]
    command = [sys.executable, str(ROOT / "examples/train_async.py"), *map(str, options)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True
    ) as process:
        try:
            while not saved.exists():
                assert process.poll() is None, process.communicate()[0]
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it: to executors as well
            out = process.communicate(timeout=60)[0]
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGINT, out
    told = re.fullmatch(
        r"train_async: stopped by SIGINT at step (\d+)/100000; "
        rf"saved up to step (\d+) in {re.escape(str(saved))}: --resume \S+ goes on from there",
        out.splitlines()[-1],
    )
    assert told and out.count("\n") == 3, out
    assert int(told[2]) == torch.load(saved, weights_only=True)["step"] <= int(told[1])


@pytest.mark.parametrize("imported", ["argparse", "numpy", "torch", "dtorch.optim.optimizers"])
def test_train_async_ends_in_one_line_at_ctrl_c_before_the_first_step(imported: str) -> None:
    """Also in the middle of torch's import, which loses some exceptions."""
    command = [sys.executable, "-X", "importtime", str(ROOT / "examples/train_async.py"), "--dp", "2"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True
    ) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if line.rpartition("|")[2].strip() == imported:
                    break
            os.killpg(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGINT, err
    told = [line for line in err.splitlines() if not line.startswith("import time:")]
    assert (out, told) == ("", ["train_async: stopped before the first step; nothing was saved"])


@pytest.mark.timeout(240)
def test_train_async_goes_on_from_a_checkpoint_on_another_mesh(tmp_path: Path, text: Path) -> None:
    saved = tmp_path / "gpt.pt"
    options = [*ASYNC, "--data", text, "--checkpoint", saved]
    fresh = run_script("examples/train_async.py", *options, "--steps", 30)
    trained = torch.load(saved, weights_only=True)
    again = run_script("examples/train_async.py", *options, "--steps", 34, "--resume", saved, "--dp", 2, "--tp", 2)
    assert "step 34/34" in again
    started, went_on = (float(re.search(r"loss (\S+) →", out)[1]) for out in (fresh, again))  # type: ignore[index]
    assert went_on < started - 0.5, "it begins anew instead of going on"
    gone_on = torch.load(saved, weights_only=True)
    assert (trained["step"], gone_on["step"]) == (30, 34)
    assert [int(saved["optimizer"]["state"][0]["step"]) for saved in (trained, gone_on)] == [30, 34]
    with pytest.raises(AssertionError, match="is at step 34; --steps 34 is not beyond it"):
        run_script("examples/train_async.py", *options, "--steps", 34, "--resume", saved)
