# SPDX-License-Identifier: Apache-2.0
"""hwloc's lstopo on a captured machine."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass

from captured import cpus


@dataclass(frozen=True)
class Function:
    """A PCI function in lstopo's tree: the bridges above it, and the CPUs and cells it is local to."""

    element: ET.Element
    bridges: tuple[str, ...]
    cpus: frozenset[int]
    cells: frozenset[int]


def functions(
    element: ET.Element,
    bridges: tuple[str, ...] = (),
    near: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset()),
) -> Iterator[Function]:
    if "cpuset" in element.attrib:
        near = (frozenset(cpus(element.attrib["cpuset"])), frozenset(cpus(element.attrib["nodeset"])))
    address = element.get("pci_busid")
    if address:
        yield Function(element, bridges, *near)
        bridges = (*bridges, address)
    for child in element.findall("object"):
        yield from functions(child, bridges, near)
