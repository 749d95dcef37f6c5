# SPDX-License-Identifier: Apache-2.0
"""The picture of a host and its guests: text on the colours of guests."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

from web_site import host

from vhpc_slurm.cli.host import picture
from vhpc_slurm.hardware import PciFunction, Reservation

SVG = "{http://www.w3.org/2000/svg}"


def light(colour: str) -> float:
    """Relative luminance, as WCAG 2.1 defines it."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, bright = sorted((light(one), light(other)))
    return (bright + 0.05) / (dark + 0.05)


def fill(element: ElementTree.Element, styles: dict[str, str], default: str) -> str:
    """The colour in the style of an element or of its classes; the last rule counts."""
    named = re.findall(r"fill:(#[0-9a-f]+)", element.get("style", ""))
    classes = element.get("class", "").split()
    return next(iter(named), [default, *(colour for name, colour in styles.items() if name in classes)][-1])


def test_text_on_every_colour_has_a_readable_contrast() -> None:
    number = len(picture.COLOURS)
    cards = tuple(
        PciFunction(f"0000:{at:02x}:00.0", code, 0x10DE, 0x2330, "vfio-pci", 0, (), "pci0000:3a")
        for at, code in enumerate((*[0x030200] * number, 0x010802, 0x020000, 0x060400, 0x088000), 16)
    )
    guests = [
        Reservation(
            generation=f"{place}.0.0badcafe",
            guest=0,
            cpus=(2 * place, 2 * place + 1),
            cells=((0, 1024),),
            hugepage_kib=0,
            devices=(cards[place].address,),
        )
        for place in range(number)
    ]
    drawing = ElementTree.fromstring(picture.draw(replace(host("n1"), pci=cards), guests, "guests"))
    sheet = drawing.findtext(f"{SVG}style") or ""
    styles = dict(re.findall(r"[.]([a-z]+)[{][^}]*fill:(#[0-9a-f]+)", sheet))
    boxes: list[tuple[tuple[float, ...], str]] = [((0.0, 0.0, 1e6, 1e6), "#ffffff")]
    poor, seen = [], set()
    for element in drawing:
        if element.tag == f"{SVG}rect" and "%" not in element.get("width", ""):
            place = tuple(float(element.get(name, "0")) for name in ("x", "y", "width", "height"))
            boxes.append((place, fill(element, styles, "#ffffff")))
        if element.tag == f"{SVG}text":
            x, y = float(element.get("x", "0")), float(element.get("y", "0"))
            below = [
                colour
                for (left, top, width, height), colour in boxes
                if left <= x <= left + width and top <= y <= top + height
            ][-1]
            seen.add(below)
            if contrast(fill(element, styles, "#222222"), below) < 4.5:
                poor.append((element.text, below))
    assert poor == []
    assert seen >= set(picture.COLOURS), "each colour has text on it"
