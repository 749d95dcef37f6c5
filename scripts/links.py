#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Find links to files and headings that do not exist: links.py FILE…

In Markdown all links of the form [text](target) are checked, in other files names such as
docs/install.md#full-disks.  Targets on the network are not checked.  Headings have the names that a forge
gives them.  Tests are skipped: they have broken links on purpose.  Exit status 1: a link is broken.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAME = re.compile(r"\b(docs/[\w/-]+\.md(?:#[\w-]+)?)")
FENCE = re.compile(r"^[ \t]*```.*?^[ \t]*```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
NETWORK = re.compile(r"[a-z]+:")


@cache
def anchors(page: Path) -> set[str]:
    """Names of a page's headings; a repeated heading gets a number."""
    names: list[str] = []
    for title in HEADING.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        name = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        number = names.count(name)
        names += [name] if number == 0 else [name, f"{name}-{number}"]
    return set(names)


def leads(target: str, page: Path, folder: Path) -> bool:
    """Whether a target exists that is named on the page, relative to the folder."""
    name, _, anchor = target.partition("#")
    other = (folder / name).resolve() if name else page
    return other.exists() and (not anchor or anchor in anchors(other))


def broken(path: Path, root: Path = ROOT) -> Iterator[str]:
    """Targets in a file that do not exist."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        targets = [target for target in LINK.findall(text) if not NETWORK.match(target)]
        yield from (target for target in targets if not leads(target, path, path.parent))
    else:
        yield from (target for target in NAME.findall(text) if not leads(target, path, root))


def main(arguments: list[str]) -> int:
    """Check the files."""
    result = 0
    for name in arguments:
        path = Path(name).resolve()
        if "tests" in path.relative_to(ROOT).parts or not path.is_file():
            continue
        try:
            targets = list(broken(path))
        except UnicodeDecodeError:
            continue
        for target in targets:
            print(f"{name}: {target} does not exist", file=sys.stderr)
            result = 1
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
