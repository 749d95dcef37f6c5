# SPDX-License-Identifier: Apache-2.0
"""Errors that a function has reported on PCI Express, as the kernel counts them.

A function that could not be relied on under one guest is not given to the
next.  Corrected errors are no sign: links have them.  ECC errors of a GPU's
memory and its MIG state are not here: sysfs has them nowhere, and no driver of
the host that would know has the device; ``devices.gpu_scrub`` may ask.

Source: Documentation/ABI/testing/sysfs-bus-pci-devices-aer (aer_dev_fatal, aer_dev_nonfatal: a
line NAME COUNT for each kind of error, then TOTAL_ERR_FATAL or TOTAL_ERR_NONFATAL).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from vhpc_slurm.node.host import sysfs

KINDS = ("fatal", "nonfatal")
_LINE = re.compile(r"^(.+?) (\d+)$", re.ASCII | re.MULTILINE)
_TOTAL = "TOTAL_ERR_"

Counts = Mapping[str, Mapping[str, int]]


def counts(path: str) -> dict[str, dict[str, int]]:
    """Errors since the kernel found the function, by kind and name; no kinds where it does not count.

    Args:
        path: the function's folder.
    """
    found = {}
    for kind in KINDS:
        text = sysfs.text_or_empty(f"{path}/aer_dev_{kind}")
        if text:
            lines = {name: int(number) for name, number in _LINE.findall(text)}
            found[kind] = {name: number for name, number in lines.items() if not name.startswith(_TOTAL)}
    return found


def risen(before: Counts, now: Counts) -> str:
    """What has happened between two readings, in words; empty when nothing.

    A function that has come back anew counts from zero again.
    """
    said = []
    for kind in KINDS:
        old, new = before.get(kind, {}), now.get(kind, {})
        anew = sum(new.values()) < sum(old.values())
        more = {name: number - (0 if anew else old.get(name, 0)) for name, number in new.items()}
        names = [f"{name} {number}" for name, number in more.items() if number > 0]
        if names:
            said.append(f"{sum(n for n in more.values() if n > 0)} {kind} ({', '.join(names)})")
    return " and ".join(said)
