# SPDX-License-Identifier: Apache-2.0
"""A PCI function and a driver: what the kernel knows of each.  ``fake_pci`` has the behaviour."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from attribute_fs import Folder


def fail(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@dataclass(eq=False)
class Driver:
    """A driver: its ids, and what its probe and remove do beyond the bus's own."""

    name: str
    ids: set[tuple[int, int]] = field(default_factory=set)
    dynamic: set[tuple[int, int]] = field(default_factory=set)
    probe: Callable[[Device], None] = lambda device: None
    remove: Callable[[Device], None] = lambda device: None


@dataclass(eq=False)
class Device:
    """A function and its state.

    ``resets`` is what the hardware can, ``methods`` what is enabled; ``on_reset``
    may raise what a reset returns.  ``locked``: a stuck thread holds the device lock and never releases it.
    """

    address: str
    path: str
    folder: Folder
    vendor: int
    device: int
    driver: str = ""
    override: str = ""
    resets: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    group: int | None = None
    physfn: str = ""
    virtfns: list[str] = field(default_factory=list)
    total_vfs: int = 0
    autoprobe: bool = True
    power: str = "D0"
    d3cold: bool = True
    config: bytearray = field(default_factory=lambda: bytearray(64))
    on_reset: Callable[[Device], None] = lambda device: None
    was_reset: int = 0
    locked: bool = False
    errors: dict[str, dict[str, int]] = field(default_factory=lambda: {"fatal": {}, "nonfatal": {}})


def aer(device: Device, kind: str) -> str:
    """The text of aer_dev_fatal or aer_dev_nonfatal."""
    names = ("Undefined", "DLP", "SDES", "TLP", "FCP", "CmpltTO", "CmpltAbrt", "UnxCmplt", "UnsupReq")
    counted = device.errors[kind]
    lines = [f"{name} {counted.get(name, 0)}" for name in names]
    return "\n".join([*lines, f"TOTAL_ERR_{kind.upper()} {sum(counted.values())}"]) + "\n"


def ids(text: str) -> tuple[int, int]:
    """Vendor and device, as new_id and remove_id read them."""
    words = text.split()
    try:
        return int(words[0], 16), int(words[1], 16)
    except (ValueError, IndexError):
        raise fail(errno.EINVAL) from None
