"""Rules as text: ``"mk,kn->mn"`` and what is said beside it, made into the rule of a call."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .call import Call
from .rule import Dims, Rule, partials

__all__ = ["Equation", "Names"]

Names = str | Sequence[str | tuple[str, ...]]
_KINDS = ("sum", "avg", "max", "min", "same")


def _name(func: Any) -> str:
    return repr(str(func._schema.name))


def _tokens(text: str) -> tuple[str, ...]:
    found: list[str] = re.findall(r"\.\.\.|\S", text)
    for token in found:
        if token not in (".", "...") and not token.isalpha():
            raise ValueError(f"{token!r} is neither a letter, '.' nor '...'")
    return tuple(found)


class _Term(NamedTuple):
    """The dims of one argument or output; `before` and `after` the "...", which may be missing."""

    before: Dims
    after: Dims
    open: bool

    @staticmethod
    def of(text: str) -> _Term:
        tokens = _tokens(text)
        letters = [t for t in tokens if t not in (".", "...")]
        if len(set(letters)) < len(letters):
            twice = next(t for t in letters if letters.count(t) > 1)
            raise ValueError(f"{twice!r} stands twice in {text!r}: a diagonal cannot be sharded, write '.' for both")
        if tokens.count("...") > 1:
            raise ValueError(f"'...' stands twice in {text!r}")
        at = tokens.index("...") if "..." in tokens else len(tokens)
        plain = tuple(["" if t == "." else t for t in tokens])
        return _Term(plain[:at], plain[at + 1 :], at < len(tokens))

    @property
    def letters(self) -> set[str]:
        return {f for f in (*self.before, *self.after) if f} | ({"..."} if self.open else set())

    def dims(self, ndim: int) -> Dims | None:
        """A factor per dim; those of "..." are counted from the right. None where the number of dims is another."""
        n = ndim - len(self.before) - len(self.after)
        if n < 0 or (n and not self.open):
            return None
        return (*self.before, *[f"...{k}" for k in range(n, 0, -1)], *self.after)


class Equation:
    """An equation and what was said beside it; called, it makes the rule of a call."""

    def __init__(self, func: Any, text: str) -> None:
        self.func, self.text = func, text
        self.names: list[str] = [a.name for a in func._schema.arguments if "Tensor" in str(a.type)]
        self.ins: dict[str, _Term] = {}
        self.outs: list[_Term] = []
        self.fields: dict[str, Any] = {}

    @staticmethod
    def of(
        func: Any,
        text: str,
        whole: str,
        even: str,
        reduce: dict[str, Any],
        linear: Names,
        addend: Names,
        local: Any,
        why: str,
    ) -> Equation:
        made = Equation(func, text)
        try:
            made._read(whole, even, reduce, linear, addend)
            made.fields.update(local=local, why=why)
            made._look(local is not None)
        except ValueError as error:
            raise ValueError(f"register_sharding({_name(func)}, {text!r}): {error}") from None
        return made

    def _read(self, whole: str, even: str, reduce: dict[str, Any], linear: Names, addend: Names) -> None:
        left, arrow, right = self.text.partition("->")
        if not arrow:
            raise ValueError("there is no '->' between inputs and outputs")
        terms = [_Term.of(t) for t in left.split(",")] if left.strip() or self.names else []
        if len(terms) != len(self.names):
            raise ValueError(
                f"{len(terms)} terms for {len(self.names)} tensor arguments ({', '.join(self.names)}): write one for "
                "each, also for those that are optional"
            )
        self.ins = dict(zip(self.names, terms, strict=True))
        returns = len(self.func._schema.returns)
        self.outs = [_Term.of(t) for t in right.split(",")] if returns else []
        if len(self.outs) != returns:
            raise ValueError(f"{len(self.outs)} terms for {returns} outputs")
        self.fields = {
            "whole": frozenset(_tokens(whole)),
            "even": frozenset(_tokens(even)),
            "reduce": reduce,
            "linear": self._groups(linear, "linear"),
            "addend": [n for group in self._groups(addend, "addend") for n in group],
        }

    def _groups(self, given: Names, what: str) -> list[tuple[str, ...]]:
        groups = [(g,) if isinstance(g, str) else g for g in ((given,) if isinstance(given, str) else given)]
        for name in (n for group in groups for n in group):
            if name not in self.names:
                raise ValueError(f"{what} names {name!r}; the tensor arguments are {', '.join(self.names)}")
        return groups

    def _look(self, has_local: bool) -> None:
        """Raise for letters that mean nothing."""
        inside = set[str]().union(*[t.letters for t in self.ins.values()])
        outside = set[str]().union(*[t.letters for t in self.outs])
        for f in outside - inside:
            if not has_local:
                raise ValueError(f"{f!r} is in an output and in no input: write '.' for a dim that comes from nowhere")
        for what in ("whole", "even", "reduce"):
            for f in self.fields[what]:
                if f not in inside | outside:
                    raise ValueError(f"{what} names {f!r}, which the equation does not have")
        for f, kinds in self.fields["reduce"].items():
            for kind in kinds if isinstance(kinds, tuple) else (kinds,):
                if kind is not None and kind not in _KINDS:
                    raise ValueError(f"reduce says {kind!r} for {f!r}; it can be one of {', '.join(_KINDS)}")
            if isinstance(kinds, tuple) and len(kinds) != len(self.outs):
                raise ValueError(f"reduce has {len(kinds)} kinds for {f!r}, one per output are {len(self.outs)}")

    def __call__(self, call: Call) -> Rule:
        owners = call.owners()
        ins: list[Dims] = []
        for name, spec in zip(owners, call.specs, strict=True):
            dims = self.ins[name].dims(spec.ndim) if name in self.ins else None
            if dims is None:
                raise ValueError(self._misfit(name, spec.shape))
            ins.append(dims)
        terms = self._output_terms(len(call.outs))
        outs: list[Dims | None] = []
        for o, (meta, term) in enumerate(zip(call.outs, terms, strict=True)):
            dims = None if meta is None else term.dims(len(meta.shape))
            if meta is not None and dims is None:
                raise ValueError(self._misfit(f"output {o}", meta.shape))
            outs.append(dims)
        open_ = sorted({f for dims in (*ins, *outs) for f in dims or () if f.startswith("...")})
        ins = self._broadcast(call, ins)
        self._sizes(call, owners, ins, outs)
        f = self.fields
        at = {name: tuple([i for i, n in enumerate(owners) if n == name]) for name in self.names}
        sets = [tuple([i for n in group for i in at[n]]) for group in f["linear"]]
        return Rule(
            tuple(ins),
            tuple(outs),
            whole=_opened(f["whole"], open_),
            even=_opened(f["even"], open_),
            reduce={k: v for key, v in f["reduce"].items() for k in _opened((key,), open_)},
            flows=partials(("sum", "avg"), *[s for s in sets if s]),
            addend=frozenset([i for n in f["addend"] for i in at[n]]),
            local=f["local"],
            why=f["why"],
        )

    def _output_terms(self, count: int) -> list[_Term]:
        """A term for each of the flat outputs: a list of tensors has one for all."""
        returns = self.func._schema.returns
        lists = [("List" in str(r.type)) or ("[]" in str(r.type)) for r in returns]
        if not returns:
            return [_Term((), (), True)] * count
        if not any(lists):
            return self.outs
        n = count - (len(returns) - sum(lists))
        return [t for t, is_list in zip(self.outs, lists, strict=True) for t in ([t] * n if is_list else [t])]

    def _misfit(self, name: str, shape: tuple[int, ...]) -> str:
        return f"register_sharding({_name(self.func)}, {self.text!r}): {name} has {len(shape)} dims, {list(shape)}"

    def _broadcast(self, call: Call, ins: list[Dims]) -> list[Dims]:
        """Dims of "..." that have one row where another input has more are tied to nothing."""
        longest: dict[str, int] = {}
        for spec, dims in zip(call.specs, ins, strict=True):
            for f, n in zip(dims, spec.shape, strict=True):
                if f.startswith("..."):
                    longest[f] = max(n, longest.get(f, 1))
        return [
            tuple(["" if f in longest and n == 1 != longest[f] else f for f, n in zip(dims, spec.shape, strict=True)])
            for spec, dims in zip(call.specs, ins, strict=True)
        ]

    def _sizes(self, call: Call, owners: list[str], ins: list[Dims], outs: list[Dims | None]) -> None:
        """Raise where a letter stands for two sizes."""
        seen: dict[str, tuple[int, str]] = {}
        tensors = [(n, s.shape, d) for n, s, d in zip(owners, call.specs, ins, strict=True)]
        tensors += [
            (f"output {o}", m.shape, d)
            for o, (m, d) in enumerate(zip(call.outs, outs, strict=True))
            if m is not None and d
        ]
        for name, shape, dims in tensors:
            for f, size in zip(dims, shape, strict=True):
                if f and seen.setdefault(f, (size, name))[0] != size:
                    other, where = seen[f]
                    raise ValueError(
                        f"register_sharding({_name(self.func)}, {self.text!r}): {f!r} is {other} in {where} and {size} "
                        f"in {name}. Write another letter, or '.' for a dim that cannot be sharded"
                    )


def _opened(letters: Iterable[str], open_: list[str]) -> frozenset[str]:
    return frozenset([k for f in letters for k in (open_ if f == "..." else (f,))])
