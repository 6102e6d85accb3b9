"""Rules for users' own operators: equations, functions, their proof, and what is wrong with those that are wrong."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Partial, PlacementError, Replicate, Shard, distribute_tensor, init_device_mesh, register_sharding
from dtorch.sharding.rule import Call, Local, Recipe, Rule, einsum, linear, names
from dtorch.testing import Mismatch, assert_close, check_sharding

from .scripts import run_script

Function = Callable[..., Any]
fresh = (f"testlib{n}" for n in itertools.count())


def define(schema: str, function: Function, fake: Function) -> Any:
    """A custom operator of a name that no other test has; ``schema`` is "(…) -> …"."""
    written = ("x",) if "!" in schema else ()
    op = torch.library.custom_op(f"{next(fresh)}::f", function, mutates_args=written, schema=schema)
    op.register_fake(fake)
    return op


def product() -> Any:
    return define("(Tensor x, Tensor y) -> Tensor", torch.mm, lambda x, y: x.new_empty(x.shape[0], y.shape[1]))


def scaled() -> Any:
    return define("(Tensor x, float by) -> Tensor", lambda x, by: x * by, lambda x, by: torch.empty_like(x))


def shards(t: torch.Tensor, *placements: Any) -> dtorch.Tensor:
    return distribute_tensor(t, init_device_mesh("cpu", 2), list(placements))


X, Y = torch.arange(15.0).reshape(5, 3) + 1, torch.arange(12.0).reshape(3, 4) - 3


def test_operators_of_a_script_run_forward_and_backward() -> None:
    assert run_script("tests/process/custom_operator.py").strip() == "as torch"


def test_an_operator_without_a_rule_runs_where_nothing_is_sharded() -> None:
    f = product()
    assert_close(f(dtorch.from_torch(X), dtorch.from_torch(Y)).to_torch(), X @ Y)
    assert_close(f(shards(X, Replicate()), shards(Y, Replicate())).to_torch(), X @ Y)
    with pytest.raises(PlacementError, match=r"no sharding rule for testlib\d+\.f\.default"):
        f(shards(X, Shard(0)), shards(Y, Replicate()))
    with dtorch.auto_redistribute():
        assert_close(f(shards(X, Shard(0)), shards(Y, Replicate())).to_torch(), X @ Y)


def test_a_rule_is_heard_after_the_operator_was_used() -> None:
    f = product()
    with pytest.raises(PlacementError):
        f(shards(X, Shard(0)), shards(Y, Replicate()))
    register_sharding(f, "mk,kn->mn", reduce={"k": "sum"}, linear=["x", "y"])
    out = f(shards(X, Shard(0)), shards(Y, Replicate()))
    assert out.placements == (Shard(0),)
    assert_close(out.to_torch(), X @ Y)


@pytest.mark.parametrize("named", [lambda f: f, lambda f: f._qualname, lambda f: f._opoverload])
def test_an_equation_gives_what_the_equation_says(named: Callable[[Any], Any]) -> None:
    f = product()
    register_sharding(named(f), "mk,kn->mn", reduce={"k": "sum"}, linear=["x", "y"])
    assert check_sharding(f, X, Y) > 50
    found = {
        (a, b): f(shards(X, a), shards(Y, b))
        for a, b in [(Shard(0), Replicate()), (Replicate(), Shard(1)), (Shard(1), Shard(0)), (Replicate(), Replicate())]
    }
    assert [t.placements[0] for t in found.values()] == [Shard(0), Shard(1), Partial(), Replicate()]
    for t in found.values():
        assert_close(t.to_torch(), X @ Y)
    summed = f(shards(X, Replicate()).redistribute(placements=[Partial()]), shards(Y, Replicate()))
    assert summed.placements == (Partial(),)
    assert_close(summed.to_torch(), X @ Y)


def test_dims_of_an_ellipsis_broadcast() -> None:
    f = define("(Tensor x, Tensor y) -> Tensor", torch.add, lambda x, y: torch.empty_like(x + y))
    register_sharding(f, "...,...->...", linear=[("x", "y")])
    a, b = torch.randn(4, 1, 3), torch.randn(5, 3)
    assert check_sharding(f, a, b) > 50
    assert f(shards(a, Shard(0)), shards(b, Replicate())).placements == (Shard(0),)
    assert f(shards(a, Replicate()), shards(b, Shard(0))).placements == (Shard(1),)


def test_lists_of_tensors_have_one_term() -> None:
    f = define("(Tensor[] x, Tensor y) -> Tensor[]", lambda x, y: [t * y for t in x], lambda x, y: [t + y for t in x])
    register_sharding(f, "bn,n->bn")
    out = f([shards(X, Shard(0)), shards(-X, Shard(0))], shards(X[0], Replicate()))
    assert [t.placements for t in out] == [(Shard(0),)] * 2
    assert_close(out[1].to_torch(), -X * X[0])


def test_numbers_that_are_free_share_a_plan() -> None:
    f = scaled()
    register_sharding(f, "...->...", free="by", linear="x")
    x = shards(X, Shard(0))
    assert [f(x, float(i)).sum().item() for i in range(1, 5)] == [X.sum().item() * i for i in range(1, 5)]
    assert len(f._opoverload._dtorch.plans) == 1


def test_a_rule_function_says_what_an_equation_cannot() -> None:
    """Each row less the number of its position: executors need to know where their rows begin."""
    f = define(
        "(Tensor x, int first) -> Tensor",
        lambda x, first: x - torch.arange(first, first + len(x)).unsqueeze(1),
        lambda x, first: torch.empty_like(x),
    )

    @register_sharding(f)
    def positions(call: Call) -> Rule:
        def local(at: Local) -> None:
            start, _ = at.span(call.specs[0].shape[0], "o0")
            at.set("first", call.arg("first") + start)

        return Rule((names(2),), (names(2),), local=local)

    assert check_sharding(f, X, 7) > 10
    assert_close(f(shards(X, Shard(0)), 7).to_torch(), f(X, 7))


def test_a_recipe_communicates() -> None:
    f = define("(Tensor x) -> Tensor", lambda x: x - x.mean(0), torch.empty_like)

    def apart(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        (x,) = args
        mean = x.mean(0, keepdim=True)
        return x - mean.redistribute(placements=[Replicate() if p.is_partial() else p for p in mean.placements])

    @register_sharding(f)
    def centred(call: Call) -> Rule:
        return einsum("bn->bn", whole=frozenset("b"), recipe=Recipe(apart))

    assert check_sharding(f, X) > 10
    out = f(shards(X, Shard(0)))
    assert out.placements == (Shard(0),)
    assert_close(out.to_torch(), X - X.mean(0))


def test_what_is_written_is_not_moved_and_not_made_partial() -> None:
    f = define("(Tensor(a!) x, Tensor y) -> ()", lambda x, y: [x.add_(y.sum(1))] and None, lambda x, y: None)
    register_sharding(f, "b,bk->")
    x, y = torch.ones(6), torch.arange(24.0).reshape(6, 4)
    target = shards(x, Shard(0))
    f(target, shards(y, Shard(0)))
    assert_close(target.to_torch(), x + y.sum(1))
    with pytest.raises(PlacementError):
        f(shards(x, Replicate()), shards(y, Shard(1)))
    with dtorch.auto_redistribute():
        f(target, shards(y, Shard(1)))
    assert target.placements == (Shard(0),)
    assert_close(target.to_torch(), x + 2 * y.sum(1))


def test_a_module_is_imported_by_the_executors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "operators_of_a_module.py").write_text(
        "import torch\n"
        "library = torch.library.Library('modulelib', 'DEF')\n"
        "library.define('f(Tensor x) -> Tensor')\n"
        "library.impl('f', lambda x: x * 3, 'CPU')\n"
        "library.impl('f', torch.empty_like, 'Meta')\n"
    )
    code = (
        "import sys; import dtorch, torch\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import operators_of_a_module\n"
        "x = torch.arange(6.0)\n"
        "mesh = dtorch.init_device_mesh('cpu', 2)\n"
        "dtorch.register_sharding('modulelib::f', 'n->n', module='operators_of_a_module')\n"
        "d = dtorch.distribute_tensor(x, mesh, [dtorch.Shard(0)])\n"
        "print(torch.ops.modulelib.f(d).to_torch().tolist())\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    assert run_script(script).strip() == str((torch.arange(6.0) * 3).tolist())
    script.write_text(
        code.replace(", module='operators_of_a_module'", "").replace("print(", "print(0) if 0 else print(")
    )
    with pytest.raises(AssertionError, match="executors have no operator modulelib::f"):
        run_script(script)


def test_defaults_of_the_schema_and_kernels_of_a_device() -> None:
    f = torch.library.custom_op(
        f"{next(fresh)}::f", lambda x, by=2.0, more=1.0: x * by + more, mutates_args=(), device_types="cpu",
        schema="(Tensor x, float by=2., *, float more=1.) -> Tensor",
    )  # fmt: skip
    f.register_fake(lambda x, by=2.0, more=1.0: torch.empty_like(x))
    register_sharding(f, "mn->mn")
    assert_close(f(shards(X, Shard(0))).to_torch(), X * 2 + 1)
    assert_close(f(shards(X, Shard(0)), 3.0, more=0.5).to_torch(), X * 3 + 0.5)


def test_a_result_that_is_an_argument_is_refused() -> None:
    f = define("(Tensor x) -> Tensor", lambda x: x, torch.empty_like)
    register_sharding(f, "mn->mn")
    with pytest.raises(RuntimeError, match="shares memory with an argument"):
        f(shards(X, Shard(0))).to_torch()


def test_an_operator_may_be_defined_again() -> None:
    name = f"{next(fresh)}::f"
    for factor in (2, 3):
        op = torch.library.custom_op(name, lambda x, k=factor: x * k, mutates_args=(), schema="(Tensor x) -> Tensor")
        op.register_fake(torch.empty_like)
        register_sharding(op, "n->n")
        assert op(shards(torch.ones(4), Shard(0))).to_torch().tolist() == [factor] * 4


# ---- what is wrong ----------------------------------------------------------------------------------


def test_a_wrong_rule_is_caught() -> None:
    f = define("(Tensor x) -> Tensor", lambda x: x.softmax(-1), torch.empty_like)
    register_sharding(f, "bn->bn")
    with pytest.raises(Mismatch, match=r"mesh of \(2,\), inputs \[Shard\(1\)\]: output 0 is wrong"):
        check_sharding(f, torch.randn(4, 6))
    g = product()
    register_sharding(g, "mk,kn->mn", reduce={"k": "max"})
    with pytest.raises(Mismatch, match="output 0 is wrong"):
        check_sharding(g, X, Y)
    h = scaled()
    register_sharding(h, "...->...", linear="x")
    with pytest.raises(ValueError, match="proves nothing"):
        check_sharding(h, X, 0.0)


WRONG = [
    ("mk,kn", {}, "no '->'"),
    ("mk->mn", {}, "1 terms for 2 tensor arguments"),
    ("mk,kn->mn,m", {}, "2 terms for 1 outputs"),
    ("mk,kn->mv", {}, "'v' is in an output and in no input"),
    ("mk,kn->mn", {"whole": "q"}, "whole names 'q'"),
    ("mk,kn->mn", {"reduce": {"k": "product"}}, "reduce says 'product' for 'k'"),
    ("mk,kn->mn", {"reduce": {"k": ("sum", "sum")}}, "reduce has 2 kinds"),
    ("mk,kn->mn", {"linear": "weight"}, "linear names 'weight'; the tensor arguments are x, y"),
    ("mk,kn->mn", {"free": "eps"}, "no argument 'eps'"),
    ("mm,kn->mn", {}, "'m' stands twice"),
    ("m1,kn->mn", {}, "'1' is neither a letter"),
]


@pytest.mark.parametrize(("equation", "fields", "message"), WRONG, ids=[w[2] for w in WRONG])
def test_an_equation_that_is_none_says_why(equation: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        register_sharding(product(), equation, **fields)


def test_what_does_not_fit_the_call_says_why() -> None:
    f = product()
    register_sharding(f, "mk,nk->mn")
    with pytest.raises(ValueError, match="'k' is 3 in x and 4 in y"):
        f(shards(X, Shard(0)), shards(Y, Replicate()))
    g = product()
    register_sharding(g, "mk,kno->mn")
    with pytest.raises(ValueError, match=r"y has 2 dims, \[3, 4\]"):
        g(shards(X, Shard(0)), shards(Y, Replicate()))


def test_there_is_one_rule_for_one_operator_that_is_there() -> None:
    f = product()
    line = sys._getframe().f_lineno + 1
    register_sharding(f, "mk,kn->mn")
    with pytest.raises(ValueError, match=rf"two rules.*test_register_sharding\.py:{line}\.\n  Write:  replace=True"):
        register_sharding(f, "mk,kn->mn")
    for replace in (False, True):
        with pytest.raises(ValueError, match=r"two rules.*dtorch's own, of dtorch\.sharding\.matmul, and stays"):
            register_sharding(torch.ops.aten.mm, "mk,kn->mn", replace=replace)
    with pytest.raises(ValueError, match="no operator 'nolib::f'"):
        register_sharding("nolib::f", "n->n")
    with pytest.raises(ValueError, match="is no operator"):
        register_sharding(torch.mm, "mk,kn->mn")


def test_a_rule_is_replaced_with_what_was_decided_by_it() -> None:
    f = product()
    register_sharding(f, "mk,kn->mn", reduce={"k": "sum"}, linear=["x", "y"])
    sharded, whole = (shards(X, Shard(1)), shards(Y, Shard(0))), (shards(X, Replicate()), shards(Y, Shard(1)))
    assert f(*sharded).placements == (Partial(),)
    assert f(*whole).placements == (Shard(1),)
    register_sharding(f, "mk,kn->mn", replace=True)
    with pytest.raises(PlacementError):
        f(*sharded)
    register_sharding(f, lambda call: einsum("mk,kn->mn", whole=frozenset("n"), reduce={"k": "sum"}), replace=True)
    assert_close(f(*sharded).to_torch(), X @ Y)
    with pytest.raises(PlacementError):
        f(*whole)


def test_a_rule_function_needs_no_decorator() -> None:
    f = product()

    def rule(call: Call) -> Rule:
        return einsum("mk,kn->mn", reduce={"k": "sum"}, flows=linear((0,), (1,)))

    assert register_sharding(f, rule) is rule
    assert check_sharding(f, X, Y) > 50
    with pytest.raises(TypeError, match="3 is neither an equation nor a rule function"):
        register_sharding(product(), 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="belong to an equation"):
        register_sharding(product(), rule, whole="k")


FAKES: list[tuple[str, Function, Function, str, str]] = [
    ("Tensor", lambda x: x[:, :2].clone(), torch.empty_like, r"\(5, 2\)", r"float32\[5, 2\]"),
    ("Tensor", lambda x: x.double(), torch.empty_like, r"float64 \(5, 3\)", r"float64\[5, 3\]"),
    ("Tensor[]", lambda x: [x + i for i in range(3)], lambda x: [x + 1, x + 2], "3 outputs where a list of 2", ""),
    ("Tensor[]", lambda x: [x + 1], lambda x: [x + 1, x + 2], "1 outputs where a list of 2", ""),
]


@pytest.mark.parametrize(("result", "function", "fake", "told", "proved"), FAKES, ids=[f[3] for f in FAKES])
def test_a_fake_that_is_wrong_is_named(result: str, function: Function, fake: Function, told: str, proved: str) -> None:
    f = define(f"(Tensor x) -> {result}", function, fake)
    register_sharding(f, "m.->m.")

    def value(found: Any) -> Any:
        return (found[0] if isinstance(found, (list, tuple)) else found).to_torch()

    for x in (dtorch.from_torch(X), shards(X, Replicate())):
        with pytest.raises(RuntimeError, match=rf"made .*{told}.* was expected; that is what its register_fake says"):
            value(f(x))
    with pytest.raises(Mismatch, match=rf"it made .*{proved}.*, and its register_fake says"):
        check_sharding(f, X)


def test_what_is_written_is_proved() -> None:
    def define_adding(schema: str, into: Function) -> Any:
        return define(schema, into, lambda x, y: None if schema.endswith("()") else y.clone())

    f = define_adding("(Tensor(a!) x, Tensor y) -> ()", lambda x, y: [x.add_(y.sum(1))] and None)
    register_sharding(f, "b,bk->")
    x, y = torch.arange(1.0, 6.0), torch.arange(20.0).reshape(5, 4)
    assert check_sharding(f, x, y) > 3
    g = define_adding("(Tensor(a!) x, Tensor y) -> ()", lambda x, y: [x.add_(y.cumsum(0)[:, 0])] and None)
    register_sharding(g, "b,bk->")
    with pytest.raises(Mismatch, match="what was written to input 0 is wrong under"):
        check_sharding(g, x, y)
    with pytest.raises(ValueError, match="nothing that it writes to changes, which proves nothing"):
        check_sharding(f, x, torch.zeros(5, 4))
    h = define_adding("(Tensor(a!) x, Tensor y) -> Tensor", lambda x, y: [x.mul_(y.sum(1))] and y + 1)
    register_sharding(h, "b,bk->bk")
    assert check_sharding(h, x, y) > 3


def test_nothing_is_proved_of_an_operator_that_does_nothing() -> None:
    f = define("(Tensor x) -> ()", lambda x: None, lambda x: None)
    register_sharding(f, "mn->")
    with pytest.raises(ValueError, match="returns nothing and writes to no argument"):
        check_sharding(f, X)


BAD: list[tuple[Any, str]] = [
    (Rule((("m", "k"), ("k",)), (("m", "n"),)), r"y has 2 dims \[3, 4\], and the rule has 1"),
    (Rule((("m", "k"),), (("m", "n"),)), "dims for 1 inputs, and the call has 2"),
    (Rule((("m", "k"), ("k", "n")), ()), "dims for 0 outputs"),
    (Rule((("m", "m"), ("k", "n")), (("m", "n"),)), "a factor stands twice in x"),
    (Rule((("m", "k"), ("k", "n")), (("m", "n"),), whole=frozenset("z")), "whole names 'z'"),
    (Rule((("m", "k"), ("k", "n")), (("m", "n"),), flows=linear((7,))), r"a flow names inputs \[7\]"),
    ("mk,kn->mn", "is a str, not a Rule"),
]


@pytest.mark.parametrize(("rule", "message"), BAD, ids=[b[1] for b in BAD])
def test_a_function_that_returns_no_rule_of_this_call_says_why(rule: Any, message: str) -> None:
    f = product()
    register_sharding(f)(lambda call: rule)
    with pytest.raises((ValueError, TypeError), match=message):
        f(shards(X, Shard(0)), shards(Y, Replicate()))


def test_a_function_that_cannot_be_sent_says_so() -> None:
    frame = sys._getframe()
    f = define("(Tensor x) -> Tensor", lambda x: x if frame else x + 1, torch.empty_like)
    with pytest.raises(TypeError, match="cannot be sent to the executors"):
        f(dtorch.from_torch(X))
