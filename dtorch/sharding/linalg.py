"""Rules of linear algebra: batches of matrices are free, a matrix itself is whole.

Each operator is written by the trailing dims of its tensors, as in ``"..,.k->.k"`` for solve: a dot for a dim that must
be whole, a letter for one that may be sharded (a column of the right-hand sides). The dims before them are batch dims,
and broadcast.
"""

from __future__ import annotations

from .matmul import broadcast_dims
from .recipes import distance
from .rule import Call, Dims, Flow, Local, Recipe, Reduce, Rule, linear, names, rule, untied

__all__: list[str] = []

_WHY = "Matrices must be whole on every rank; their batch dims may be sharded."

_MATRICES = {
    # one matrix
    "cholesky": "..->..",
    "cholesky_inverse": "..->..",
    "geqrf": "..->..,.",
    "inverse": "..->..",
    "linalg_cholesky_ex": "..->..,",
    "linalg_eig": "..->.,..",
    "_linalg_eigvals": "..->.",
    "linalg_inv_ex": "..->..,",
    "linalg_ldl_factor_ex": "..->..,.,",
    "linalg_lu": "..->..,..,..",
    "linalg_lu_factor_ex": "..->..,.,",
    "linalg_matrix_exp": "..->..",
    "linalg_qr": "..->..,..",
    "_linalg_det": "..->,..,.",
    "_linalg_eigh": "..->.,..",
    "_linalg_slogdet": "..->,,..,.",
    "_linalg_svd": "..->..,.,..",
    # a matrix and its factors
    "linalg_householder_product": "..,.->..",
    "lu_unpack": "..,.->..,..,..",
    "ormqr": "..,.,.k->.k",
    "linalg_pinv": "..,,->..",
    # right-hand sides
    "cholesky_solve": ".k,..->.k",
    "linalg_ldl_solve": "..,.,.k->.k",
    "linalg_lu_solve": "..,.,.k->.k",
    "linalg_solve_triangular": "..,.k->.k",
    "triangular_solve": ".k,..->.k,..",
    "_linalg_solve_ex": "..,.k->.k,..,.,",
    "linalg_lstsq": "..,.k->.k,k,,.",
}
# The result is linear in the right-hand sides; what else comes out does not depend on them.
_LINEAR_IN = {
    "cholesky_solve": 0,
    "triangular_solve": 0,
    "linalg_ldl_solve": 2,
    "linalg_lu_solve": 2,
    "linalg_solve_triangular": 1,
    "_linalg_solve_ex": 1,
    "ormqr": 2,
}


def _equation(call: Call) -> tuple[list[str], list[str]]:
    """The trailing dims of inputs and outputs."""
    ins, outs = [side.split(",") for side in _MATRICES[call.stem].split("->")]
    ins = ins[: len(call.specs)]
    if call.arg("left", True) is False:  # X A = B
        ins, outs = [s.replace(".k", "k.") for s in ins], [s.replace(".k", "k.") for s in outs]
    if call.stem == "_linalg_solve_ex":
        a, b = call.specs
        if b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1]):  # vectors, not matrices
            ins, outs = ["..", "."], [".", *outs[1:]]
    return ins, outs


def _core(letters: str) -> Dims:
    return tuple(["" if c == "." else c for c in letters])


@rule(*_MATRICES)
def matrices(call: Call) -> Rule | None:
    """Matrix by matrix."""
    ins, outs = _equation(call)
    if len(ins) != len(call.specs) or any(s.ndim < len(c) for s, c in zip(call.specs, ins, strict=True)):
        return None
    leads = [s.shape[: s.ndim - len(c)] for s, c in zip(call.specs, ins, strict=True)]
    n = max(map(len, leads))
    padded = [(1,) * (n - len(lead)) + lead for lead in leads]
    batch, tied = tuple(max(sizes) if 0 not in sizes else 0 for sizes in zip(*padded, strict=True)), names(n, "b")
    found = []
    for meta, core in zip(call.outs, outs, strict=True):
        if meta is None:
            found.append(None)
        elif len(meta.shape) == n + len(core) and meta.shape[:n] == batch:
            found.append((*tied, *_core(core)))
        else:
            found.append(untied(len(meta.shape)))  # not asked for: an empty tensor
    reduce: dict[str, Reduce] = {
        f: tuple([None if dims is not None and f in dims else "same" for dims in found]) for f in (*tied, "k")
    }
    flows: tuple[Flow, ...] = ()
    if call.stem in _LINEAR_IN and found[0]:
        kinds = [(kind, *["same"] * (len(found) - 1)) for kind in ("sum", "avg")]
        flows = tuple([Flow(out[0], frozenset({_LINEAR_IN[call.stem]}), out) for out in kinds])
    rows = tuple([(*broadcast_dims(lead, batch, tied), *_core(core)) for lead, core in zip(leads, ins, strict=True)])
    return Rule(rows, tuple(found), reduce=reduce, flows=flows, why=_WHY)


@rule("linalg_cross")
def cross(call: Call) -> Rule | None:
    """Linear in both; the dim of three must be whole."""
    meta = call.outs[0]
    if meta is None or len(call.specs) != 2:
        return None
    n = len(meta.shape)
    out = list(names(n))
    out[call.arg("dim", -1) % n] = ""
    ins = tuple([broadcast_dims(s.shape, meta.shape, tuple(out)) for s in call.specs])
    why = "The dim of the vectors' three components must be whole on every rank."
    return Rule(ins, (tuple(out),), flows=linear((0,), (1,)), why=why)


@rule("_trilinear")
def trilinear(call: Call) -> Rule:
    """A product of three tensors, each with dims of size 1 put in where its list says, summed over some dims."""
    expands = [set(call.arg(f"expand{i}")) for i in (1, 2, 3)]
    total = names(call.specs[0].ndim + len(expands[0]))
    summed = set(call.arg("sumdim"))
    ins = tuple([tuple([f for d, f in enumerate(total) if d not in gone]) for gone in expands])
    out = tuple([f for d, f in enumerate(total) if d not in summed])
    return Rule(ins, (out,), reduce={total[d]: "sum" for d in summed}, flows=linear((0,), (1,), (2,)))


# ---- distances -------------------------------------------------------------------------------------------


@rule("dist")
def dist(call: Call) -> Recipe:
    """The norm of a difference, of shards as of Partials."""
    return Recipe(distance)


def _points(call: Call, first: int) -> tuple[Dims, Dims, Dims]:
    """Factors of two sets of points, [..., p, m] and [..., r, m], and of the distances between them, [..., p, r]."""
    x, y = call.specs[first : first + 2]
    shape = tuple([max(a, b) if a and b else 0 for a, b in zip(x.shape[:-2], y.shape[:-2], strict=True)])
    batch = names(len(shape), "b")
    left, right = (broadcast_dims(s.shape[:-2], shape, batch) for s in (x, y))
    return (*left, "p", ""), (*right, "r", ""), (*batch, "p", "r")


_POINTS_WHY = "The points' coordinates must be whole on every rank."


@rule("_cdist_forward", "_euclidean_dist")
def cdist(call: Call) -> Rule | None:
    """Each pair of points by itself."""
    if call.specs[0].ndim != call.specs[1].ndim:
        return None
    x, y, out = _points(call, 0)
    return Rule((x, y), (out,), local=_cdist_mode, why=_POINTS_WHY)


def _cdist_mode(local: Local) -> None:
    # By default the number of points decides between two formulas, which differ in the last bits: take the global one.
    if "compute_mode" in local.call.sig.index and local.arg("compute_mode") in (None, 0):
        many = any([s.shape[-2] > 25 for s in local.call.specs])
        local.set("compute_mode", 1 if many else 2)


@rule("_cdist_backward")
def cdist_backward(call: Call) -> Rule | None:
    """The gradient of the first points is a sum over the second ones."""
    if call.specs[1].ndim != call.specs[2].ndim:
        return None
    x, y, out = _points(call, 1)
    return Rule((out, x, y, out), (x,), reduce={"r": "sum"}, flows=linear((0,)), local=_dense, why=_POINTS_WHY)


def _dense(local: Local) -> None:
    local.use("dtorch.on_contiguous", local.func, *local.args, **local.kwargs)
