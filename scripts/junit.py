# SPDX-License-Identifier: Apache-2.0
"""Results of tests that pytest and ctest write as JUnit files, for scripts/check and scripts/steady."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree


def cases(file: Path) -> list[ElementTree.Element]:
    """The tests in a file; none if it is missing or was cut off."""
    try:
        return list(ElementTree.parse(file).iter("testcase"))  # noqa: S314 - our own tests have written it
    except (FileNotFoundError, ElementTree.ParseError):
        return []


def has_failed(case: ElementTree.Element) -> bool:
    """Whether a test, or what was before or after it, has failed."""
    return case.find("failure") is not None or case.find("error") is not None


def failures(file: Path) -> list[str]:
    """The different failures in a file: tests that one fixture of their module failed are one of them."""
    failed = [case for case in cases(file) if has_failed(case)]
    return list(
        dict.fromkeys(
            f"{case.get('classname')}: {message(case)}" if case.find("error") is not None else name(case)
            for case in failed
        )
    )


def name(case: ElementTree.Element) -> str:
    """A test as a person names it."""
    where = (case.get("classname") or "").removeprefix("tests.")
    test = (case.get("name") or "").split("@", maxsplit=1)[0]
    return f"{where}::{test}" if where and where != test else test


def output(case: ElementTree.Element, lines: int = 40, width: int = 160) -> list[str]:
    """The last lines that a failed test has printed."""
    text = case.findtext("system-out") or ""
    return [line[:width] for line in text.splitlines() if line.strip("- ") not in ("", "Captured Out")][
        -lines:
    ]


def message(case: ElementTree.Element, width: int = 200) -> str:
    """The first lines of why a test has failed, as one line of at most ``width`` characters."""
    found = case.find("failure")
    found = found if found is not None else case.find("error")
    words = "" if found is None else " ".join((found.get("message") or found.text or "").split())
    return words if len(words) <= width else f"{words[: width - 1]}…"
