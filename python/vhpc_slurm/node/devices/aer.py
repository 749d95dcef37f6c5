# SPDX-License-Identifier: Apache-2.0
"""PCI Express errors of a function, as the kernel counts them.

A function that had errors under one guest is not given to the next.  Corrected
errors are ignored: healthy links have them.  ECC errors and the MIG mode of a
GPU are not in sysfs, and the host driver that could report them is not bound;
``devices.gpu_scrub`` can check them.

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
    """Errors since the kernel found the function, by kind and name; empty if it does not count them.

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
    """New errors between two readings, as text; empty if there are none.

    A function that was removed and found again counts from zero.
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
