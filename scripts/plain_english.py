#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare the English of each folder with its limit: plain_english.py [OPTION]… [FILE…]

A sentence of Markdown, of a docstring or of a comment counts as hard to read if it has one of CONSTRUCTS.
The share of such sentences in each folder must not exceed the folder's limit in plain_english.toml, and a
limit may only fall.  A folder without limit has that of NEW; one sentence more is allowed in every folder.
Without FILE all files of the checkout are read.

    --show [FOLDER]  print the sentences that match, of all folders or of those that begin with FOLDER
    --all            print all folders, not only those that exceed their limits
    --lower          write lower limits for folders that have become better
    --base REVISION  compare the limits with those of this revision too

Exit status 1: a share exceeds its limit, or a limit exceeds that of the revision.
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LIMITS = Path(__file__).with_suffix(".toml")
NEW = 3.0
"""Limit in percent of a folder that plain_english.toml lacks."""
WORDS = 3
"""A shorter text, such as a cell of a table with a name, is no sentence."""
HEAD = "# Highest share of sentences, in percent, that scripts/plain_english.py may find in each folder.\n"

CONSTRUCTS = re.compile(
    r"""^(?:What|Who|Whose|Whom)\b(?!.*\?)            # headless subject: "What a job needs is …"
      | ^(?:Where|When)\b(?!.*[,?]).*\b(?:is|are|was|were)\b
      | \b(?:[Oo]f|[Bb]y|[Tt]o)\ (?:which|whom)\b
      | \b(?:[Bb]eside|[Nn]obody|[Nn]or|anew)\b
      | \bfor\ ever\b
      | \b(?:go|goes|going|went)\ on\b
      | \b(?:say|says|said)\ so\b | \bsaid\ to\ be\b
      | \b(?:is|are|was|were)\ to\ (?!(?:an?|the|this|that|these|those|it|its|each|every|one|X)\b)[a-z]+\b
    """,
    re.VERBOSE,
)
PYTHON = re.compile(
    r'^[ \t]*[rb]?"""(?P<doc>.*?)"""|(?P<lines>(?:^[ \t]*\#[^\n]*\n)+)|  \# (?P<end>[^\n]*)',
    re.MULTILINE | re.DOTALL,
)
SHELL = re.compile(r"(?P<lines>(?:^[ \t]*#[^\n]*\n)+)|[ \t]# (?P<end>[^\n]*)", re.MULTILINE)
C = re.compile(r"/\*(?P<lines>.*?)\*/|[ \t]//[ ](?P<end>[^\n]*)", re.DOTALL)
FENCE = re.compile(r"^[ \t]*```.*?^[ \t]*```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"``[^`]*``|`[^`]*`|\[\[.*?\]\]")
BLOCK = re.compile(r"\n[ \t]*\n|\n[ \t]*(?:[-*]|\d+\.)[ \t]|^#+[ ]|\n#+[ ]|\|", re.MULTILINE)
MARKS = re.compile(r"^[ \t]*(?:\#+!?|\*+)[ \t]?", re.MULTILINE)
END = re.compile(r"(?<=[.!?])[\"')]*\s+")
NO_PROSE = re.compile(r"\A#!.*|^[^\n]*SPDX-License-Identifier: [\w.-]+(?: \*/)?\n", re.MULTILINE)
NOT_TEXT = re.compile(r"(?:^|/)(?:corpus|data|templates|results)/")
INTERPRETER = re.compile(r"#!.*\b(?:(?P<shell>sh|bash)|python3?)\b")


class Sentence(NamedTuple):
    """A sentence and its file."""

    path: str
    text: str

    @property
    def matches(self) -> bool:
        """Whether it has one of CONSTRUCTS."""
        return CONSTRUCTS.search(self.text) is not None


class Count(NamedTuple):
    """Sentences of a folder."""

    sentences: int
    matching: list[Sentence]

    @property
    def share(self) -> float:
        """Matching sentences in percent of all."""
        return 100 * len(self.matching) / self.sentences if self.sentences else 0.0

    def within(self, limit: float) -> bool:
        """Whether the share is at most the limit, with one matching sentence less."""
        return 100 * (len(self.matching) - 1) <= limit * self.sentences


def folder(path: str) -> str:
    """The folder under which a file is counted: python/vhpc_slurm/X, tests/X, or the first folder."""
    parts = path.split("/")[:-1]
    depth = {"python": 3, "tests": 2}.get(parts[0], 1) if parts else 0
    return "/".join(parts[:depth]) or "."


def texts(path: str, text: str) -> Iterator[str]:
    """Prose of a file: a Markdown file without code, or docstrings and comments."""
    suffix = Path(path).suffix
    if suffix == ".md":
        yield FENCE.sub("", text)
        return
    interpreter = INTERPRETER.match(text)
    if suffix in {".c", ".h"}:
        pattern = C
    elif suffix == ".py" or (interpreter and not interpreter["shell"]):
        pattern = PYTHON
    elif suffix == ".sh" or interpreter:
        pattern = SHELL
    else:
        return
    for match in pattern.finditer(NO_PROSE.sub("", text)):
        found = match[match.lastgroup or 0]
        yield MARKS.sub("", found) if match.lastgroup == "lines" else found


def sentences(path: str, text: str) -> Iterator[Sentence]:
    """Sentences of a file on one line each; code in backticks is the word X."""
    for prose in texts(path, text):
        for block in BLOCK.split(CODE.sub("X", prose)):
            for sentence in END.split(block):
                words = sentence.split()
                if len(words) >= WORDS:
                    yield Sentence(path, " ".join(words))


def count(paths: list[str]) -> dict[str, Count]:
    """Sentences of each folder; other files than text are skipped."""
    found: dict[str, list[Sentence]] = {}
    for path in paths:
        if NOT_TEXT.search(path) or Path(path).suffix not in {".md", ".py", ".sh", ".c", ".h", ""}:
            continue
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError):
            continue
        found.setdefault(folder(path), []).extend(sentences(path, text))
    return {
        name: Count(len(of), [each for each in of if each.matches])
        for name, of in sorted(found.items())
        if of
    }


def lower(limits: dict[str, float], counts: dict[str, Count]) -> dict[str, float]:
    """Limits of the folders that exist: the share rounded up to a tenth, 0 for one sentence; never raised."""
    shares = {name: 0.0 if of.within(0.0) else math.ceil(of.share * 10) / 10 for name, of in counts.items()}
    return {name: min(limits.get(name, 100.0), share) for name, share in shares.items()}


def raised(limits: dict[str, float], before: dict[str, float]) -> list[str]:
    """Folders whose limit is higher than before."""
    return [name for name, limit in limits.items() if name in before and limit > before[name]]


def tracked() -> list[str]:
    """Files of the checkout, except ignored ones."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]


def limits_of(revision: str) -> dict[str, float]:
    """Limits of a revision; empty if it has none."""
    command = ["git", "show", f"{revision}:./scripts/{LIMITS.name}"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    return tomllib.loads(shown.stdout) if shown.returncode == 0 else {}


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--show", nargs="?", const="", default=None)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--lower", action="store_true")
    parser.add_argument("--base", default="")
    parser.add_argument("files", nargs="*")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Count, print and compare."""
    options = parse(arguments)
    counts = count(options.files or tracked())
    limits = tomllib.loads(LIMITS.read_text()) if LIMITS.exists() else {}
    if options.lower:
        limits = lower(limits, counts)
        LIMITS.write_text(HEAD + "".join(f'"{name}" = {limit}\n' for name, limit in limits.items()))
    result = 0
    for name, of in counts.items():
        limit = limits.get(name, NEW)
        over = not of.within(limit)
        result |= over
        if over or options.all:
            found = f"{len(of.matching)} of {of.sentences} sentences"
            print(f"{name:32} {of.share:5.1f} %  limit {limit:4.1f} %  {found}{'  TOO MANY' if over else ''}")
        if options.show is not None and name.startswith(options.show):
            for sentence in of.matching:
                print(f"    {sentence.path}: {sentence.text}")
    if result:
        print("scripts/plain_english.py --show FOLDER prints the sentences")
    for name in raised(limits, limits_of(options.base)) if options.base else []:
        print(f"{LIMITS.name}: the limit of {name} was raised; limits may only fall")
        result = 1
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
