# SPDX-License-Identifier: Apache-2.0
"""The check of the C code's structure finds what it is there to find."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[3]
CHECK = CHECKOUT / "scripts/cmodules.py"

LOW = "int low(void)\n{\n    return 1;\n}\n"
HIGH = "int high(void)\n{\n    return low();\n}\n"


def check(*arguments: Path | str) -> tuple[int, str]:
    command = [sys.executable, str(CHECK), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def write(folder: Path, **sources: str) -> Path:
    for name, text in sources.items():
        stem, _, suffix = name.rpartition("_")
        (folder / f"{stem}.{suffix}").write_text(text)
    return folder


def test_modules_in_layers_pass(tmp_path: Path) -> None:
    assert check(write(tmp_path, low_c=LOW, high_c=HIGH)) == (0, "")


@pytest.mark.parametrize(
    "back",
    [
        "int low(void)\n{\n    return high();\n}\n",
        "int low(void)\n{\n    return level;\n}\n",
        '#include "high.h"\n' + LOW,
    ],
    ids=["a call", "a variable", "an include"],
)
def test_a_circle_is_found(tmp_path: Path, back: str) -> None:
    write(tmp_path, low_c=back, high_c=f"int level = 3;\n{HIGH}", high_h="int high(void);\n")
    status, said = check(tmp_path)
    assert status == 1
    assert said == f"{tmp_path}: cycle of modules: high -> low, low -> high\n"


def test_a_circle_of_three_is_found(tmp_path: Path) -> None:
    first = "void first(void)\n{\n    second();\n}\n"
    second = "void second(void)\n{\n    third();\n}\n"
    third = "void third(void)\n{\n    first();\n}\n"
    status, said = check(write(tmp_path, a_c=first, b_c=second, c_c=third))
    assert (status, said) == (1, f"{tmp_path}: cycle of modules: a -> b, b -> c, c -> a\n")


@pytest.mark.parametrize(
    "harmless",
    [
        "static int high(void)\n{\n    return 1;\n}\n" + LOW,
        "/* high() calls this */\n" + LOW,
        'const char *low(void)\n{\n    return "high";\n}\n',
        "int low(struct floor *f)\n{\n    return f->high + f[1].high;\n}\n",
    ],
    ids=["a static function", "a comment", "a text", "a member"],
)
def test_the_same_name_with_another_meaning_is_not_counted(tmp_path: Path, harmless: str) -> None:
    assert check(write(tmp_path, low_c=harmless, high_c=HIGH)) == (0, "")


def test_long_functions_and_files_are_found(tmp_path: Path) -> None:
    body = "    count++;\n"
    write(tmp_path, sixty_c=f"void a(void)\n{{\n{body * 57}}}\n")
    assert check(tmp_path) == (0, "")
    write(tmp_path, more_c=f"\nvoid b(void)\n{{\n{body * 58}}}\n", file_h="\n" * 401)
    status, said = check(tmp_path)
    assert status == 1
    assert said.splitlines() == [
        f"{tmp_path}/file.h: 401 lines, the limit is 400",
        f"{tmp_path}/more.c:2: b() has 61 lines, the limit is 60",
    ]


def test_the_check_sees_the_dependencies_of_this_project() -> None:
    """A pattern that no longer matches how the sources are written would find nothing."""
    status, said = check("--graph", CHECKOUT / "guest/agent", CHECKOUT / "spank_plugin")
    graph = dict(line.split(": ", 1) for line in said.splitlines() if not line.endswith(": "))
    assert status == 0
    assert {"reply", "fabric", "identity"} <= set(graph[f"{CHECKOUT}/guest/agent/control"].split())
    assert "session_list" in graph[f"{CHECKOUT}/guest/agent/hostcall"].split()
    assert "plugin" in graph[f"{CHECKOUT}/spank_plugin/register"].split()  # uses its variable only
