# SPDX-License-Identifier: Apache-2.0
"""Each promise has a test, and tests that documents name exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
REFERENCE = re.compile(r"`((?:unit|lab|hw|guest|spank|image)/[\w/]+\.(?:py|c))(?:::(\w+))?`")
SPEC = importlib.util.spec_from_file_location("promises", ROOT / "scripts/promises.py")
assert SPEC is not None
assert SPEC.loader is not None
promises = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(promises)


def test_each_promise_has_a_test() -> None:
    assert promises.page(ROOT)[1] == []


def test_tests_that_the_page_of_settings_names_exist() -> None:
    found = REFERENCE.findall((ROOT / "docs/performance-settings.md").read_text())
    missing = []
    for file, test in found:
        path = ROOT / "tests" / file
        source = path.read_text() if path.is_file() else ""
        if not re.search(rf"(?:def|void) {test}\(" if test else ".", source):
            missing.append(f"{file}::{test}")
    assert missing == []
    assert len(found) > 3


def test_fuzz_targets_that_hold_a_promise_are_run() -> None:
    script = (ROOT / "scripts/fuzz").read_text()
    named = re.findall(r"fuzz/(fuzz_\w+)\.", promises.page(ROOT)[0])
    assert named
    assert [target for target in named if f"[{target}]=" not in script] == []


def test_missing_and_unknown_keys_are_reported(tmp_path: Path) -> None:
    for name, text in {
        "docs/guarantees.md": "- `a.one`: One\n- `a.two`: Two\n",
        "docs/threat-model.md": "- `attack.item`: a\n\nNever (`attack.uids`).\n",
        "tests/slow.toml": '"unit/test_x.py::test_slow" = "long"\n',
        "tests/unit/test_x.py": """
import pytest
pytestmark = [pytest.mark.promise("attack.uids")]
@pytest.mark.promise("a.one")
def test_slow(): ...
@pytest.mark.promise("a.three")
def test_y(): ...
""",
        "tests/guest/test_z.c": "/* promise: a.one */\nstatic void z(void **state)\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    text, wrong = promises.page(tmp_path)
    assert text.removeprefix(promises.HEAD) == (
        "- `guest/test_z.c`: `a.one`\n- `unit/test_x.py`: `a.one`*, `attack.uids`\n"
    )
    assert wrong == [
        "a.two: no test names this key",
        "attack.item: no test names this key",
        "a.three: named by `unit/test_x.py::test_y` and on no page",
    ]
