# SPDX-License-Identifier: Apache-2.0
"""scripts/links.py: links of documents, and names of documents elsewhere, that it reports."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location("links", Path(__file__).parents[3] / "scripts/links.py")
assert SPEC is not None
assert SPEC.loader is not None
links = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(links)

PAGE = """# Two words: `code`
```
# no heading
```
## Again
## Again
"""


@pytest.mark.parametrize(
    ("target", "leads"),
    [
        ("page.md", True),
        ("other.md", False),
        ("page.md#two-words-code", True),
        ("page.md#two-words", False),
        ("page.md#no-heading", False),
        ("page.md#again-1", True),
        ("page.md#again-2", False),
        ("#here", True),
        ("#there", False),
        ("https://example.org/none", True),
    ],
)
def test_links_of_documents_lead_to_files_and_headings(tmp_path: Path, target: str, leads: bool) -> None:
    (tmp_path / "page.md").write_text(PAGE)
    page = tmp_path / "index.md"
    page.write_text(f"# Here\n[text]({target})\n")
    assert list(links.broken(page, tmp_path)) == ([] if leads else [target])


def test_documents_that_sources_name_exist(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/page.md").write_text(PAGE)
    source = tmp_path / "x.c"
    source.write_text("/* docs/page.md, docs/page.md#again; docs/page.md#none, docs/none.md */")
    assert list(links.broken(source, tmp_path)) == ["docs/page.md#none", "docs/none.md"]
