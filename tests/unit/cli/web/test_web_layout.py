# SPDX-License-Identifier: Apache-2.0
"""Pages with the longest names, in Chromium: on a phone, a tablet, a laptop and a wide screen."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from chromium import CHROMIUM, Driven, driven

pytest.importorskip("uvicorn", reason="vhpc web needs it: pip install 'vhpc-slurm[web]'")

import web_long_site as site
from cluster_process import allow_clusters
from controller_lab import HAVE_MUNGED, munged, stop
from vhpcd_process import make
from web_site import Web

from vhpc_slurm.cli.jobs import report, reporthtml
from vhpc_slurm.config.fabric import Fabric

pytestmark = [
    pytest.mark.skipif(
        not HAVE_MUNGED or os.geteuid() != 0, reason="needs munged (apt install munge), and root for it"
    ),
    pytest.mark.skipif(
        CHROMIUM is None, reason="needs Chromium: apt install --no-install-recommends chromium"
    ),
    pytest.mark.long,
]
WIDTHS = (360, 768, 1280, 1920)
CLUSTERS = ("/clusters/1", "/?clusters")
"""Pages of a site without keys of a fabric, which clusters cannot have."""
PAGES = ("/", *(f"/jobs/{job}" for job in (site.RUNS, site.BOOTS, site.REFUSED)), *CLUSTERS, "report")

SEEN = """
(() => {
  const edge = document.documentElement.clientWidth;
  const name = (one) => `${one.tagName}.${one.getAttribute("class") || ""} ${one.textContent.slice(0, 40)}`;
  const wider = [], scrolls = [], broken = [], faint = [], overlaps = [];
  for (const one of document.body.querySelectorAll("*")) {
    const box = one.parentElement.closest(".wide, svg");
    if (box === null && one.getBoundingClientRect().right > edge + 1) wider.push(name(one));
  }
  for (const box of document.querySelectorAll(".wide")) {
    if (box.scrollWidth > box.clientWidth + 1 && !box.querySelector(".matrix, :scope > img, :scope > svg")) {
      scrolls.push(box.getAttribute("aria-label") + ": " + box.textContent.slice(0, 40));
    }
  }
  const ruler = document.createElement("canvas").getContext("2d");
  for (const one of document.querySelectorAll("[data-label]")) {
    const label = getComputedStyle(one, "::before");
    if (label.content === "none") continue;
    ruler.font = `${label.fontWeight} ${label.fontSize} ${label.fontFamily}`;
    const words = label.whiteSpace === "nowrap" ? [one.dataset.label] : one.dataset.label.split(" ");
    if (Math.max(...words.map((word) => ruler.measureText(word).width)) > parseFloat(label.width)) {
      overlaps.push(`${one.dataset.label}: ${one.textContent.slice(0, 40)}`);
    }
  }
  const parts = (colour) => (colour.match(/[\\d.]+/g) || []).map(Number);
  const light = (colour) => {
    const [red, green, blue] = parts(colour).slice(0, 3).map((value) => value / 255)
      .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const ground = (one) => {
    for (; one; one = one.parentElement) {
      const colour = getComputedStyle(one).backgroundColor;
      if ((parts(colour)[3] ?? 1) > 0) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const compare = (words, ink, one) => {
    const [dark, bright] = [light(ink), light(ground(one))].sort((a, b) => a - b);
    const contrast = (bright + 0.05) / (dark + 0.05);
    if (contrast < 4.5) faint.push(`${words.slice(0, 30)}: ${contrast.toFixed(2)}`);
  };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = texts.nextNode(); text; text = texts.nextNode()) {
    const one = text.parentElement;
    if (one.closest("script, style, title") || one.getClientRects().length === 0) continue;
    const style = getComputedStyle(one);
    if (one.closest(".wide > svg")) continue;  // placement: test_picture.py
    if (text.data.trim()) compare(text.data.trim(), one.closest("svg") ? style.fill : style.color, one);
    for (const word of text.data.matchAll(/[A-Za-z0-9]+/g)) {
      const range = document.createRange();
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      const lines = new Set([...range.getClientRects()].map((rect) => Math.round(rect.top)));
      if (lines.size > 1) broken.push(word[0]);
    }
  }
  for (const field of document.querySelectorAll("input")) {
    compare(field.placeholder, getComputedStyle(field, "::placeholder").color, field);
  }
  const page = document.documentElement.scrollWidth - edge;
  return JSON.stringify({ page, wider, scrolls, overlaps, broken, faint });
})()
"""
"""What is wrong with a page: elements beyond its edge, boxes that scroll although they need not, names
of values that do not fit before them, words that are broken, texts with less contrast than WCAG 2.1 AA."""

Look = Callable[[str, int, str], dict[str, Any]]


@pytest.fixture(scope="module")
def look(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Look]:
    """A page as Chromium shows it; in a window of some pixels, light or dark."""
    folder = tmp_path_factory.mktemp("site")
    for path in (folder, folder.parent):
        path.chmod(0o755)
    with munged() as key:
        vhpcd = make(folder, key, Fabric(backend="ethernet", vlan_first=100)).start()
        (folder / "clusters").mkdir()
        other = make(folder / "clusters", key)
        allow_clusters(other, *site.NODES)
        other.start()
        try:
            site.fill(vhpcd)
            site.fill_clusters(other)
            found = report.gather(vhpcd.client, site.RUNS)
            assert found is not None
            (folder / "report.html").write_text(reporthtml.render(found))
            webs = [Web(vhpcd), Web(other)]
            try:
                with driven(folder) as page:
                    for web in webs:
                        page.open(web.address)
                    yield looking(page, [web.address.split("/?")[0] for web in webs], folder)
            finally:
                for web in webs:
                    web.end()
        finally:
            for one in (vhpcd, other):
                assert one.process is not None
                stop(one.process)


def looking(page: Driven, bases: Sequence[str], folder: Path) -> Look:
    @cache
    def look(path: str, width: int, scheme: str) -> dict[str, Any]:
        page.look(width, 900, scheme)
        base = bases[path in CLUSTERS]
        page.open(f"file://{folder}/report.html" if path == "report" else base + path)
        assert page.value("document.querySelectorAll('td').length") > 8, "the page has its tables"
        found: dict[str, Any] = json.loads(page.value(SEEN))
        picture = folder / f"{path.rpartition('/')[2] or 'overview'}-{width}-{scheme}.png"
        page.picture(picture)
        return found | {"picture": picture}

    return look


@pytest.mark.promise("web.layout")
@pytest.mark.parametrize("path", PAGES)
@pytest.mark.parametrize("width", WIDTHS)
def test_no_part_of_a_page_is_beyond_its_edge(look: Look, path: str, width: int) -> None:
    found = look(path, width, "light")
    assert (found["page"], found["wider"], found["overlaps"]) == (0, [], []), found["picture"]


@pytest.mark.promise("web.layout")
@pytest.mark.parametrize("path", PAGES)
@pytest.mark.parametrize("width", WIDTHS)
def test_only_keys_and_pictures_scroll_sideways(look: Look, path: str, width: int) -> None:
    found = look(path, width, "light")
    assert found["scrolls"] == [], found["picture"]


@pytest.mark.promise("web.layout")
@pytest.mark.parametrize("path", PAGES)
@pytest.mark.parametrize("width", WIDTHS)
def test_names_break_behind_separators_only(look: Look, path: str, width: int) -> None:
    found = look(path, width, "light")
    assert found["broken"] == [], found["picture"]


@pytest.mark.promise("web.layout")
@pytest.mark.parametrize("path", PAGES)
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_have_a_readable_contrast(look: Look, path: str, width: int, scheme: str) -> None:
    found = look(path, width, scheme)
    assert found["faint"] == [], found["picture"]
