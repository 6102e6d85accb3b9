"""What the documents say is so: links lead somewhere, snippets run, the folder list is the folders."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
SNIPPETS = [
    textwrap.dedent(snippet)
    for page in ("README.md", "docs/adding-an-operator.md", "docs/failures.md")
    for snippet in re.findall(r"(?ms)^ *```python\n(.*?)^ *```", (ROOT / page).read_text())
]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    missing = [x for x in links if "://" not in x and not (page.parent / x).exists()]
    assert not missing


@pytest.mark.parametrize("snippet", SNIPPETS, ids=[s.split("\n")[-2][:30] for s in SNIPPETS])
def test_snippets_run(snippet: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(snippet, "snippet.py", "exec"), {"__name__": "snippet"})
    assert capsys.readouterr().out.strip(), "every snippet prints what it found"


@pytest.mark.parametrize("folder", ["sharding", "runtime", "executor"])
def test_architecture_names_every_file(folder: str) -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    section = re.search(rf"(?s)\n`dtorch/{folder}/`.*?(?=\n\n)", text)
    assert section, f"docs/architecture.md has no section on dtorch/{folder}/"
    named = set(re.findall(r"`(\w+\.py)`", section.group()))
    there = {p.name for p in (ROOT / "dtorch" / folder).glob("*.py")} - {"__init__.py"}
    assert named == there


def test_make_targets_that_the_documents_name_exist() -> None:
    targets = set(re.findall(r"(?m)^([a-z]+):", (ROOT / "Makefile").read_text()))
    named = {t for page in PAGES for t in re.findall(r"(?:`|(?m:^))make ([a-z]+)", page.read_text())}
    assert named <= targets


def test_tests_that_the_documents_name_exist() -> None:
    named = {t for page in PAGES for t in re.findall(r"`(test_\w+\.py)::(\w+)`", page.read_text())}
    assert named
    missing = [
        f"{file}::{test}"
        for file, test in sorted(named)
        if not any(f"def {test}(" in path.read_text() for path in (ROOT / "tests").rglob(file))
    ]
    assert not missing
