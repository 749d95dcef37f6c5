# SPDX-License-Identifier: Apache-2.0
"""docs/performance-settings.md says what the golden domains have, and leaves nothing of it out."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path

import pytest

from vhpc_slurm import config

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs/performance-settings.md").read_text()
SNIPPET = re.compile(r"`(<[^`]+>)`")
ANY = "…"
# Of these sections the page has to name everything; others are not about speed.
WHOLE = ("memoryBacking", "cputune", "numatune", "features", "clock", "cpu")
FRAMES = frozenset(("kvm", "hugepages", "numa", "distances", "acpi"))  # hold what counts, or are nothing


@cache
def golden() -> tuple[ET.Element, ...]:
    return tuple(ET.parse(path).getroot() for path in sorted((ROOT / "tests/data/domain").glob("*.xml")))


def parse(snippet: str) -> ET.Element:
    whole = snippet.endswith("/>") or "</" in snippet
    closed = snippet if whole else f"{snippet}</{re.split('[ >]', snippet[1:])[0]}>"
    return ET.fromstring(closed.replace("qemu:", ""))


def matches(wanted: ET.Element, found: ET.Element) -> bool:
    """Whether tag, attributes and text are the wanted ones, and there are no other attributes."""
    text = (wanted.text or "").strip()
    return (
        wanted.tag == found.tag
        and wanted.attrib.keys() == found.attrib.keys()
        and all(value in (ANY, found.attrib[name]) for name, value in wanted.attrib.items())
        and text in ("", ANY, (found.text or "").strip())
    )


def occurs(wanted: ET.Element) -> bool:
    return any(matches(wanted, found) for domain in golden() for found in domain.iter())


def split() -> tuple[list[str], list[str]]:
    used, _, unused = TEXT.partition("## Not used")
    return SNIPPET.findall(used), SNIPPET.findall(unused)


@pytest.mark.parametrize("snippet", split()[0])
def test_settings_of_the_page_are_in_a_golden_domain(snippet: str) -> None:
    assert occurs(parse(snippet))


@pytest.mark.parametrize("snippet", split()[1])
def test_settings_that_are_not_used_are_in_no_domain(snippet: str) -> None:
    assert not occurs(parse(snippet))


def test_all_of_these_sections_is_on_the_page() -> None:
    named = [parse(snippet) for snippet in split()[0]]
    for domain in golden():
        for section in (child for child in domain if child.tag in WHOLE):
            for found in section.iter():
                if found is not section and found.tag not in FRAMES and not list(found):
                    assert any(matches(one, found) for one in named), ET.tostring(found)


def test_every_table_row_names_its_xml_and_its_check() -> None:
    used = re.sub(r"\n## Shared folders\n.*?(?=\n## )", "", TEXT.partition("## Not used")[0], flags=re.DOTALL)
    rows = [line.split(" | ") for line in used.splitlines() if line.count(" | ") == 3]
    rows = [row for row in rows if row[0] != "| setting"]
    assert len(rows) > 30
    for row in rows:
        assert SNIPPET.search(row[1]), row
        assert re.search(r"asked for|decided: `|measured: |`unit/", row[3]), row


def test_each_key_that_is_named_exists() -> None:
    keys = {f"{section}.{key}" for section, key, _, _ in config.describe()}
    named = set(re.findall(r"`((?:host|placement|guests|devices)\.[a-z_]+)`", TEXT))
    checks = {"devices.iommu", "devices.vfio"}  # of vhpc doctor
    assert named - checks <= keys
    assert named


def test_each_check_of_the_doctor_exists() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "python/vhpc_slurm/cli/host/checks").glob("*.py"))
    for name in ("node.kvm", "network.vhost", "node.hugepages", "devices.iommu", "devices.vfio"):
        assert f"`{name}`" in TEXT
        assert f'"{name}"' in source
