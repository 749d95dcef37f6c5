# SPDX-License-Identifier: Apache-2.0
"""Sources that are hostile or broken, each through a whole import: one clear line, and nothing is left.

The tables are in ``hostile_tars``, ``hostile_containers`` and ``hostile_files``; a new format is a
new table. Registries that misbehave are in ``test_import_registry``, manifests in ``test_manifest``,
signatures in ``test_image_signatures``.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import hostile_containers
import hostile_tars
import pytest
from hostile_rig import Case, Site

CASES = [*hostile_tars.CASES, *hostile_containers.CASES]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    found = Site(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(found.work))
    return found


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_what_cannot_be_imported_is_one_line(site: Site, case: Case) -> None:
    line = site.refusal(case.make(site.source))
    assert re.search(case.says, line), line
    assert line.startswith("cannot import ")
    for word in ("Traceback", "Error", "/in/source", "/out", "its reader"):
        assert word not in line, line


def test_no_case_has_the_name_of_another() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
