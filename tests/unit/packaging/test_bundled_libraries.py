# SPDX-License-Identifier: Apache-2.0
"""Python libraries that packages for Debian 12 bundle (packaging/bookworm)."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# what packages.debian.org says of bookworm
DEBIAN_12 = {
    "jinja2": "3.1.2",
    "rich": "13.3.1",
    "typer": "0.7.0",
    "setuptools": "66.1.1",
    "libvirt-python": "9.0.0",
    "cryptography": "38.0.4",
    "prometheus-client": "0.16.0",
    "pymysql": "1.0.2",
    "starlette": "0.26.1",
    "uvicorn": "0.17.6",
}
# of an optional part whose programs are too old as well (docs/install.md), and what Debian never had
ABSENT = {"oslo.utils", "pyslurm"}


def pins(part: str) -> dict[str, str]:
    """Name and version of each line of a file; pip accepts only files with these digests."""
    lines = (ROOT / f"packaging/bookworm/{part}.txt").read_text(encoding="utf-8").splitlines()
    found = [
        re.fullmatch(r"([a-z-]+)==([0-9.]+)((?: --hash=sha256:[0-9a-f]{64})+)", line)
        for line in lines
        if line and not line.startswith("#")
    ]
    return {one[1]: one[2] for one in found if one is not None} if all(found) else {}


def wanted(project: dict[str, Any]) -> list[Requirement]:
    optional = project["project"]["optional-dependencies"]
    parts = [lines for name, lines in optional.items() if name not in {"dev", "docs"}]
    lines = [*project["project"]["dependencies"], *(line for part in parts for line in part)]
    return [Requirement(line) for line in lines]


@pytest.mark.parametrize("need", wanted(PROJECT), ids=str)
def test_debian_12_or_the_packages_have_each_library(need: Requirement) -> None:
    if need.name not in ABSENT:
        assert need.specifier.contains({**DEBIAN_12, **pins("bundled")}[need.name])


def test_the_build_has_setuptools_that_the_project_demands() -> None:
    (need,) = (Requirement(line) for line in PROJECT["build-system"]["requires"])
    assert not need.specifier.contains(DEBIAN_12[need.name])
    assert need.specifier.contains(pins("build")[need.name])


def test_only_libraries_that_debian_12_lacks_are_bundled() -> None:
    needs = {need.name: need for need in wanted(PROJECT)}
    for name in pins("bundled"):
        assert name not in DEBIAN_12 or not needs[name].specifier.contains(DEBIAN_12[name])
    assert pins("bundled").keys() <= needs.keys()


def test_the_licence_of_each_bundled_library_is_kept() -> None:
    text = (ROOT / "packaging/bookworm/copyright").read_text(encoding="utf-8")
    for name, version in pins("bundled").items():
        assert re.search(rf"^Files: \S+/site-packages/{name}/", text, re.MULTILINE)
        assert f"The wheel of {name} {version} on PyPI." in text
