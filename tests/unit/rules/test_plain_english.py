# SPDX-License-Identifier: Apache-2.0
"""scripts/plain_english.py: the sentences that it counts in each folder, and the comparison with limits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts/plain_english.py"

HARD = [
    "What a job needs is reserved.",
    "Whose fault it is that a guest was refused.",
    "Where it is decides the rest.",
    "The range by which chunks are checked.",
    "Data beside the configuration.",
    "No key, nor a port.",
    "A device that nobody has.",
    "The file is to be removed.",
    "The reader waits for ever.",
    "The log begins anew.",
    "The job goes on.",
    "The node says so.",
    "The value is said to be wrong.",
]
PLAIN = [
    "What does a job need?",
    "Where a node fails, the job is requeued.",
    "When the job ends, its guests end.",
    "Besides this file, three others exist.",
    "Access is to the file only.",
    "Run `beside` or `nobody` as a command.",
    "The nodes for which a job waits.",
]
FILES = {
    "docs/a.md": "# Nobody has a title\n\n```\nthis goes on for ever here\n```\n\n"
    "- It runs well. It goes\n  on now.\n\n"
    "| a cell of words | a thing beside it |\n|---|---|\n",
    "python/vhpc_slurm/node/boot/a.py": '"""Starts a guest.\n\nNobody reads this."""\n\n'
    'TEXT = "it goes on for ever"\n'
    "# A comment that is\n# to continue here.\nx = 1  # the place of which it is\n",
    "guest/a.c": "/* SPDX-License-Identifier: Apache-2.0 */\n"
    "/* Closes the socket, and\n * goes on. */\nint a;\n",
    "tool/run": "#!/bin/bash\n# What runs is a shell.\necho 'goes on for ever'\n",
    "tests/data/a.md": "It goes on here for ever.\n",
}
LIMITS = '"docs" = 60.0\n"guest" = 99.0\n"python/vhpc_slurm/node" = 40.0\n'


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with a copy of the script and its limits."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/plain_english.py").write_bytes(SCRIPT.read_bytes())
    (tmp_path / "scripts/plain_english.toml").write_text(LIMITS)
    return tmp_path


def run(tree: Path, *options: str) -> tuple[int, list[list[str]]]:
    """Exit status, and the words of each line."""
    command = [sys.executable, "scripts/plain_english.py", *options]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, [line.split() for line in done.stdout.splitlines()]


def test_hard_sentences_are_found_and_plain_ones_are_not(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/plain_english.py").write_bytes(SCRIPT.read_bytes())
    (tmp_path / "a.md").write_text("\n\n".join(HARD + PLAIN))
    code, (_, *shown, _) = run(tmp_path, "--show", ".", "a.md")
    assert code == 1
    assert [" ".join(words[1:]) for words in shown] == HARD


def test_folders_have_shares_of_prose_and_not_of_code(tree: Path) -> None:
    code, (*lines, hint) = run(tree, "--all", *FILES)
    shares = {words[0]: (words[1], words[6], words[8]) for words in lines}
    assert shares == {
        "docs": ("60.0", "3", "5"),
        "guest": ("100.0", "1", "1"),
        "python/vhpc_slurm/node": ("75.0", "3", "4"),
        "tool": ("100.0", "1", "1"),
    }
    assert (code, hint[:2]) == (1, ["scripts/plain_english.py", "--show"])
    assert [words[0] for words in lines if words[-1] == "MANY"] == ["python/vhpc_slurm/node"]


def test_limits_are_lowered_and_never_raised(tree: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    subprocess.run(["git", "add", "."], cwd=tree, check=True)
    commit = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "A"]
    subprocess.run(commit, cwd=tree, check=True)
    (tree / "docs/a.md").write_text("Simple words are good.\n\nThey are plain words.\n")
    assert run(tree, "--lower", *FILES)[0] == 1
    assert (tree / "scripts/plain_english.toml").read_text().splitlines()[1:] == [
        '"docs" = 0.0',
        '"guest" = 0.0',
        '"python/vhpc_slurm/node" = 40.0',
        '"tool" = 0.0',
    ]
    (tree / "scripts/plain_english.toml").write_text(LIMITS.replace("60.0", "61.0"))
    code, lines = run(tree, "--base", "HEAD")
    assert (code, lines[0][0], " ".join(lines[-1])) == (
        1,
        "python/vhpc_slurm/node",
        "plain_english.toml: the limit of docs was raised; limits may only fall",
    )
    assert run(tree, "--base", "HEAD", "docs/a.md") == (1, lines[-1:])
