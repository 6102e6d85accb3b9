"""Options, and the variables that set them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from ..errors import ConfigError
from ..runtime import config
from .finding import Finding, human

__all__ = ["check_variables", "document", "in_force", "meanings", "option_lines", "options"]

_SIZES = "_bytes"


def check_variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Every ``DTORCH_…`` variable that is set: whether it can be read, and whether it means anything."""
    names = config.variables()
    unknown = config.unknown_variables(environ)
    found = False
    for variable in sorted(v for v in environ if v.startswith("DTORCH_")):
        text = f"{environ[variable]!r}"
        found = True
        if variable in unknown:
            meant = unknown[variable]
            fix = f"unset {variable}" + (f"; export {meant}={environ[variable]}" if meant else "")
            yield Finding(variable, "warning", config.unknown_text(variable, meant), fix)
        elif variable not in names:
            yield Finding(variable, "-", f"{text}: for the tests alone")
        elif not environ[variable]:
            yield Finding(variable, "-", "set to nothing, which is as if it were not set")
        else:
            try:
                config.from_environ({variable: environ[variable]})
            except ConfigError as error:
                if str(error).startswith(variable):
                    yield Finding(variable, "wrong", str(error), f"unset {variable}")
                    continue
            yield Finding(variable, "ok", f"{text} sets {names[variable]}")
    try:
        config.from_environ(environ)
    except ConfigError as error:
        # What no variable alone is to blame for.
        if not any(str(error).startswith(v) for v in names):
            yield Finding("together", "wrong", str(error), f"unset {' '.join(v for v in names if environ.get(v))}")
    if not found:
        yield Finding("DTORCH_…", "-", "none is set")


def in_force(environ: Mapping[str, str]) -> config.Config:
    """What `environ` sets, over the defaults; the defaults alone where something in it cannot be read."""
    try:
        return config.from_environ(environ)
    except ConfigError:
        return config.Config()


def meanings() -> dict[str, str]:
    """Option → what it means, from the documentation of :class:`~dtorch.runtime.config.Config`; without that (python
    -OO), nothing."""
    text = inspect.getdoc(config.Config) or ""
    section = text.partition("Attributes:\n")[2]
    found: dict[str, str] = {}
    for names, meaning in re.findall(r"(?ms)^    (\w[\w, ]*): (.*?)(?=^    \w|\Z)", section):
        for name in names.split(", "):
            found[name] = " ".join(meaning.split())
    return found


def options(environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """Every option: name, value, where that is from, default, variable, meaning."""
    names, means, default = config.variables(), meanings(), config.Config()
    now = in_force(environ)
    found: list[dict[str, Any]] = []
    for name in (f.name for f in fields(config.Config)):
        by = [v for v, option in names.items() if option == name and environ.get(v)]
        value = getattr(now, name)
        found.append(
            {
                "name": name,
                "value": value,
                "source": by[-1] if by else "default",
                "default": getattr(default, name),
                "variable": config.variable_of(name),
                "meaning": means.get(name, ""),
            }
        )
    return found


def _shown(name: str, value: object) -> str:
    if name.endswith(_SIZES) and isinstance(value, int):
        return human(value).replace(" ", "")
    return "None" if value is None else str(value)


def option_lines(found: list[dict[str, Any]]) -> list[str]:
    """The options as lines of a table."""
    wide = max(len(o["name"]) for o in found)
    lines: list[str] = []
    for o in found:
        source = "default" if o["source"] == "default" else f"from {o['source']}"
        meaning = re.split(r"[.;:] ", o["meaning"])[0].rstrip(".").replace("``", "")
        lines.append(f"{o['name']:<{wide}}  {_shown(o['name'], o['value']):<8} {source:<8} {meaning}")
    return lines


def document() -> str:
    """docs/options.md."""
    lines = [
        "# Options",
        "",
        "`python -m dtorch options` prints this page; `python -m dtorch doctor` prints what is in force, and why.",
        "",
        "An option is set by `dtorch.configure(name=value)`, or else by its environment variable, which is read when",
        "dtorch is first used. Sizes are bytes, and may be written `64M` or `2GiB`; times are seconds; switches are",
        "`1` or `0`. What cannot be read raises `ConfigError`, in one line. A variable that begins with `DTORCH_` and",
        "sets nothing is named once in the log.",
        "",
        "| option | default | variable | meaning |",
        "|---|---|---|---|",
    ]
    for o in options({}):
        meaning = o["meaning"].replace("``", "`").replace("|", "\\|")
        meaning = re.sub(r":\w+:`(~?[\w.]+)`", lambda m: f"`{m[1].lstrip('~')}`", meaning)
        lines.append(f"| `{o['name']}` | {_shown(o['name'], o['default'])} | `{o['variable']}` | {meaning} |")
    return "\n".join(lines) + "\n"
