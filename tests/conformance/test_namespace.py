"""Every public callable of torch is reachable from dtorch, and gives torch's result on dtorch tensors, or is listed.

The operator database's own samples where it has some, the calls of namespace_torch.py and namespace_rest.py where it
has none; on one device, replicated on two, and in shards of dim 0 under ``auto_redistribute``.
"""

from __future__ import annotations

import importlib
import itertools
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.testing._internal.common_methods_invocations import op_db

import dtorch

from .namespace_check import WHERE, Wrong, check, check_case, place
from .namespace_exceptions import EXCEPTIONS, document
from .namespace_rest import REST
from .namespace_torch import TORCH

SPACES: dict[str, Any] = {
    "torch": torch,
    "Tensor": torch.Tensor,
    "nn.functional": torch.nn.functional,
    "linalg": torch.linalg,
    "fft": torch.fft,
    "special": torch.special,
}
# Their names are torch's own objects, and what is made of them has tests of its own (test_nn, test_optim, test_data).
REACHED = (
    "amp autograd func nn nn.init nn.parameter nn.utils optim optim.lr_scheduler signal.windows utils.data".split()
)
# What these return has no value to compare.
UNFILLED = frozenset("empty empty_like empty_permuted empty_strided new_empty new_empty_strided".split())
# The state of a generator, and what was saved, belong to no mesh; nor does the rank of a matrix without elements.
PLAIN = frozenset(["torch.get_rng_state", "torch.save", "torch.load"])
SAMPLES = 1
# They write in place inside, to what would have to move: refused in shards, though the caller writes nothing.
REFUSED = frozenset("torch.gru torch.gru_cell torch.lstm_cell torch.rrelu nn.functional.rrelu".split())
CASES = {**TORCH, **REST}


def _name(variant: Any) -> str:
    return getattr(variant, "__name__", "")


def _database() -> dict[str, Any]:
    """ "abs", "linalg.inv", "Tensor.add_", …: the first entry of the operator database under that name."""
    found: dict[str, Any] = {}
    for op in op_db:
        for name in (op.name, *(alias.name for alias in op.aliases)):
            found.setdefault(name, op)
        for each in (op, *op.aliases):
            for variant in (each.method_variant, each.inplace_variant):
                found.setdefault(f"Tensor.{_name(variant)}", op)
    return found


DATABASE = _database()


def names(space: str) -> list[str]:
    """Public functions of `space`; types are torch's own objects, and tested for that."""
    where = SPACES[space]
    return [
        n
        for n in dir(where)
        if not n.startswith("_")
        and callable(getattr(where, n))
        and not isinstance(getattr(where, n), (type, types.ModuleType))
        and type(getattr(where, n)).__module__ != "typing"
    ]


def entry(space: str, name: str) -> Any:
    """The operator database's entry for a function, or None."""
    path = name if space == "torch" else f"{space}.{name}"
    if space == "Tensor":
        return DATABASE.get(path) or DATABASE.get(name)
    return DATABASE.get(path) or (DATABASE.get(path[:-1]) if name.endswith("_") else None)


def lookup(root: Any, space: str, name: str) -> Any:
    for part in [] if space == "torch" else space.split("."):
        root = getattr(root, part)
    return getattr(root, name)


def listed(space: str) -> set[str]:
    return {n for spaces in EXCEPTIONS.values() for n in spaces.get(space, "").split()}


_samples: dict[Any, list[Any]] = {}


def samples(op: Any) -> list[Any]:
    """The first of its samples, float32 where it takes those."""
    if op.full_name not in _samples:
        torch.manual_seed(0)
        dtypes = (torch.float32, torch.int64, torch.complex64, torch.bool)
        dtype = next(d for d in dtypes if d in op.dtypes)
        _samples[op.full_name] = list(itertools.islice(op.sample_inputs("cpu", dtype), SAMPLES))
    return _samples[op.full_name]


def refused(path: str, where: str, error: Exception) -> bool:
    """Whether `error` is the refusal of a write in place that would have to move what it writes."""
    writes = path.endswith("_") or path in REFUSED
    return writes and where == "sharded" and isinstance(error, dtorch.PlacementError)


@pytest.mark.parametrize("space", SPACES)
def test_every_function_is_tested_or_listed(space: str) -> None:
    exceptions = listed(space)
    tested = {n for n in names(space) if f"{space}.{n}" in CASES or entry(space, n) is not None}
    assert not set(names(space)) - tested - exceptions, "neither tested nor listed"
    assert not exceptions - set(names(space)), "listed, and not of torch"
    assert not {n for n in exceptions if f"{space}.{n}" in CASES}, "tested and listed"


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("space", SPACES)
def test_the_database_s_calls(space: str, where: str) -> None:
    at, wrong = place(where), []
    exceptions = listed(space)
    for name in names(space):
        op = entry(space, name)
        if op is None or f"{space}.{name}" in CASES or name in exceptions:
            continue
        theirs = lookup(torch, space, name)
        theirs, ours = getattr(theirs, "_dtorch_original", theirs), lookup(dtorch, space, name)
        compared = 0
        for sample in samples(op):
            try:
                compared += check(
                    ours,
                    theirs,
                    (sample.input, *sample.args),
                    sample.kwargs,
                    at,
                    values=name not in UNFILLED,
                    lies=f"{space}.{name}" not in PLAIN,
                )
            except Exception as e:
                compared += 1
                if not refused(f"{space}.{name}", where, e):
                    wrong.append(f"{space}.{name}: {type(e).__name__}: {e}")
                    break
        if not compared:
            wrong.append(f"{space}.{name}: torch raises for every sample; write it a case")
    assert not wrong, f"{len(wrong)} of {space} on {where}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("where", WHERE)
def test_calls_that_the_database_lacks(where: str) -> None:
    at, wrong = place(where), []
    for name, case in CASES.items():
        try:
            check_case(case, at, lies=name not in PLAIN)
        except Exception as e:
            if not refused(name, where, e):
                wrong.append(f"{name}: {type(e).__name__}: {e}")
    assert not wrong, f"{len(wrong)} on {where}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("space", [*SPACES, *REACHED])
def test_every_name_is_reached(space: str) -> None:
    """All of torch's public names, types and constants as well, under dtorch's name."""
    theirs: Any = torch
    if space == "Tensor":
        theirs, ours = torch.Tensor, dtorch.Tensor
    elif space == "torch":
        ours = dtorch
    else:
        theirs = importlib.import_module(f"torch.{space}")
        ours = importlib.import_module(f"dtorch.{space}")
    public = getattr(theirs, "__all__", None) or [n for n in dir(theirs) if not n.startswith("_")]
    missing = [n for n in public if not hasattr(ours, n)]
    assert not missing
    types_ = [n for n in public if isinstance(getattr(theirs, n), type)]
    others = {n for n in types_ if not issubclass(getattr(ours, n), getattr(theirs, n))}
    assert others <= {"Graph", "DataParallel", "DataLoader", "Tensor"}, others


def test_no_module_of_dtorch_s_hides_a_function() -> None:
    own = {path.stem for path in Path(dtorch.__path__[0]).iterdir() if not path.name.startswith("_")}
    assert not {n for n in own if callable(getattr(torch, n, None))}


def test_modules_that_torch_alone_has() -> None:
    assert importlib.import_module("dtorch.utils.benchmark") is importlib.import_module("torch.utils.benchmark")
    assert importlib.import_module("dtorch.nn.attention") is importlib.import_module("torch.nn.attention")
    assert importlib.import_module("dtorch.autograd.functional") is importlib.import_module("torch.autograd.functional")
    assert torch.utils.benchmark.__name__ == "torch.utils.benchmark"
    for name in ("dtorch.nonsense", "dtorch.distributed.rpc", "dtorch.utils.nonsense"):
        with pytest.raises(ModuleNotFoundError, match=name):
            importlib.import_module(name)


def test_the_document_shows_the_table() -> None:
    text = (Path(__file__).parents[2] / "docs" / "namespace.md").read_text()
    assert document().strip() in text, "paste what `python -m tests.conformance.test_namespace` prints"


def test_a_wrong_result_is_told() -> None:
    for ours, theirs in ((torch.sin, torch.cos), (torch.sum, torch.neg), (lambda t: t.double(), lambda t: t)):
        with pytest.raises(Wrong):
            check(ours, theirs, (torch.ones(3),), {}, place("one"))


if __name__ == "__main__":
    print(document())
