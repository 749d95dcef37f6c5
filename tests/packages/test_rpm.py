# SPDX-License-Identifier: Apache-2.0
"""The RPM spec: built by rpmbuild and read by rpmlint, both of Debian; never installed."""

from __future__ import annotations

import re

import pytest
from debs import LIMIT_S, ROOT, run

PARTS = {"client", "common", "controller", "image-tools", "node", "spank-plugin"}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * LIMIT_S)]


@pytest.fixture(scope="module")
def built() -> str:
    """The last line of rpmlint."""
    return run("packaging/rpm/build")


def test_all_rpm_packages_are_built(built: str) -> None:
    names = {path.name for path in (ROOT / "build/rpm-packages").glob("*.rpm")}
    found = {match[1] for name in names if (match := re.match(r"vhpc-(.*)-0\.\d+\.\d+-1\.", name))}
    assert found == PARTS
    assert len(names) == len(PARTS)


def test_rpmlint_has_no_complaint(built: str) -> None:
    # seven: the spec and its six packages
    last = built.splitlines()[-1]
    assert "6 packages and 1 specfiles checked; 0 errors, 0 warnings" in last
