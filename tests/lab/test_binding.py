# SPDX-License-Identifier: Apache-2.0
"""Tasks in guests are on the CPUs and nodes that they have without guests."""

from __future__ import annotations

import re

import pytest
from cluster import Lab
from twins import SOURCES, sections, submit

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("probes")]

BINDING = (SOURCES / "binding.job").read_text()


@pytest.fixture(scope="module")
def binding(lab: Lab, probes: None) -> list[dict[str, str]]:
    """Whole nodes, one job after the other: a guest's CPUs then have the numbers of the node's."""
    twins = submit(lab, BINDING, "-N2", "--ntasks-per-node=2", "--mem-per-cpu=600", "--exclusive", "-t", "15")
    return [sections(text) for text in twins.wait().outputs()]


@pytest.mark.promise("place.binding")
@pytest.mark.results
@pytest.mark.parametrize("name", re.findall(r"^section ([\w-]+)", BINDING, re.M))
def test_tasks_are_bound_to_the_same_cpus(binding: list[dict[str, str]], name: str) -> None:
    ours, theirs = (parts[name] for parts in binding)
    assert ours == theirs
    assert ours or name == "end"


@pytest.mark.results
def test_the_bindings_differ_from_each_other(binding: list[dict[str, str]]) -> None:
    """Lest both jobs be equal because none of them was bound."""
    found = binding[0]
    every = found["script"].splitlines()[0]
    assert found["none"] == f"0: {every}\n1: {every}\n"
    assert found["map"].startswith("0: 1\n1: 0\n")
