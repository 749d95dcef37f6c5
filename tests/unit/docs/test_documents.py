# SPDX-License-Identifier: Apache-2.0
"""The documents: decisions are whole, and every page is in the list of pages and on the site."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from command_tree import commands

ROOT = Path(__file__).parents[3]
DECISIONS, MAX_WORDS = ROOT / "docs/decisions", 150
CODE = ("confine", "guest", "hookd", "packaging", "python", "spank_plugin", "vmimages")


def test_the_site_has_every_page() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    pages = [path.relative_to(ROOT) for path in [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]]
    assert {page for page in pages if not re.search(rf"- (.+: )?{page}$", text, re.MULTILINE)} == set()
    assert set(re.findall(r"docs/man/(.+)\.md", text)) == manuals()


def manuals() -> set[str]:
    """Names of the manual pages; one is completed when it is built."""
    return {path.name.removesuffix(".in") for path in (ROOT / "docs/man").iterdir()}


def test_the_list_of_pages_has_every_page() -> None:
    text = (ROOT / "docs/README.md").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert {page for page in pages if f"({page})" not in text} == set()
    assert {name for name in manuals() if f"](man/{name}" not in text} == set()


def decisions() -> Iterator[tuple[str, str, str]]:
    """File, title and text of each decision, in the order of the index."""
    index = (DECISIONS / "README.md").read_text()
    for file in re.findall(r"^- \[.+\]\((\w+\.md)\)", index, re.MULTILINE):
        _, *entries = re.split(r"^### ", (DECISIONS / file).read_text(), flags=re.MULTILINE)
        yield from ((file, entry.partition("\n")[0], entry) for entry in entries)


def test_each_decision_has_its_parts_and_a_title_of_its_own() -> None:
    for _, title, entry in decisions():
        parts = re.findall(r"^\*\*(\w+)\.\*\*", entry, re.MULTILINE)
        assert parts == ["Context", "Choice", "Price"], title
        assert len(entry.split()) <= MAX_WORDS, f"{title}: more than {MAX_WORDS} words"
    titles = [title for _, title, _ in decisions()]
    assert len(set(titles)) == len(titles) > 90


def test_the_index_of_decisions_has_every_topic() -> None:
    named = {file for file, _, _ in decisions()}
    assert named == {path.name for path in DECISIONS.glob("*.md")} - {"README.md"}


def test_decisions_that_code_names_exist() -> None:
    titles = {title for _, title, _ in decisions()}
    named = {
        (path.name, title)
        for folder in CODE
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".c", ".h", ".txt"}
        for title in re.findall(r"^[#/ *]+Decision: (.+?)(?: \*/)?$", path.read_text(), re.MULTILINE)
    }
    assert {(file, title) for file, title in named if title not in titles} == set()
    assert len(named) > 50


def test_the_users_guide_names_the_commands_without_json() -> None:
    text = (ROOT / "docs/users-guide.md").read_text()
    found = re.search(r"^All but (.+) have the option `--json`\.$", text, re.MULTILINE)
    assert found is not None
    without = {
        name
        for name, command in commands().items()
        if not command.hidden and not hasattr(command, "commands")
        if "--json" not in [word for parameter in command.params for word in parameter.opts]
    }
    assert set(re.findall(r"`(.+?)`", found[1])) == without


def test_terms_are_in_order_and_once() -> None:
    items = re.findall(r"^- \*\*(.+?)\*\*: ", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    terms = [re.sub(r"[,(].*", "", item).strip().lower() for item in items]
    assert terms == sorted(terms)
    assert len(items) == len(set(items)) > 40
