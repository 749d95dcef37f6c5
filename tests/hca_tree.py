# SPDX-License-Identifier: Apache-2.0
"""A guest's InfiniBand adapters as its sysfs shows them, made of plain files.

Modelled on what mlx5 shows of a virtual function: the files and the forms of
their values are those of Documentation/ABI/stable/sysfs-class-infiniband and
drivers/infiniband/core/sysfs.c of Linux 6.12; a table of 128 keys; the class
holds links to the devices.  Nothing here acts: who plays the adapter writes.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

TABLE = 128


class HcaTree:
    """The tree at ``root``, which stands for /sys."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "class/infiniband").mkdir(parents=True, exist_ok=True)

    def port(self, device: str) -> Path:
        return self.root / f"class/infiniband/{device}/ports/1"

    def add(self, device: str, guid: int, keys: Sequence[int] = (), state: str = "4: ACTIVE") -> None:
        """An adapter with one port."""
        slot = 5 + len(list((self.root / "class/infiniband").iterdir()))
        place = f"devices/pci0000:00/0000:00:{slot:02x}.0/infiniband/{device}"
        ports = self.root / place / "ports/1"
        for folder in ("gids", "pkeys"):
            (ports / folder).mkdir(parents=True)
        words = f"{guid:016x}"
        node_guid = ":".join(words[at : at + 4] for at in range(0, 16, 4))
        plain = {
            "node_guid": node_guid,
            "sys_image_guid": node_guid,
            "node_type": "1: CA",
            "hca_type": "MT4124",
        }
        for name, value in plain.items():
            (self.root / place / name).write_text(f"{value}\n")
        values = {
            "link_layer": "InfiniBand",
            "phys_state": "5: LinkUp",
            "lid": "0x7",
            "rate": "100 Gb/sec (4X EDR)",
        }
        for name, value in values.items():
            (ports / name).write_text(f"{value}\n")
        (ports / "gids/0").write_text(f"fe80:0000:0000:0000:{node_guid}\n")
        (self.root / f"class/infiniband/{device}").symlink_to(f"../../{place}")
        self.set_state(device, state)
        self.set_keys(device, keys)

    def add_interface(self, device: str, name: str, pkey: int, *, parent: bool = True) -> None:
        """IPoIB's interface of the port: what drivers/infiniband/ulp/ipoib/ipoib_main.c shows of it."""
        # devices/pci0000:00/0000:00:05.0/infiniband/mlx5_0; not resolved, the root may be another process's
        device_place = (self.root / f"class/infiniband/{device}").readlink().relative_to("../..")
        place = device_place.parents[1] / "net" / name
        (self.root / place).mkdir(parents=True)
        values = {"type": "32", "dev_port": "0", "dev_id": "0x0", "pkey": f"0x{pkey:04x}", "mode": "datagram"}
        for file, value in values.items():
            (self.root / place / file).write_text(f"{value}\n")
        if parent:  # children have none
            (self.root / place / "create_child").write_text("")
        (self.root / "class/net").mkdir(exist_ok=True)
        (self.root / f"class/net/{name}").symlink_to(f"../../{place}")
        link = self.root / device_place / "device"
        if not link.is_symlink():
            link.symlink_to("../..")

    def _set(self, path: Path, text: str) -> None:
        """As sysfs: a reader sees the old value or the new one, and never an empty file."""
        new = self.root / ".new"
        new.write_text(text)
        new.replace(path)

    def set_interface_key(self, name: str, pkey: int) -> None:
        self._set(self.root / f"class/net/{name}/pkey", f"0x{pkey:04x}\n")

    def set_state(self, device: str, state: str) -> None:
        self._set(self.port(device) / "state", f"{state}\n")

    def set_keys(self, device: str, keys: Sequence[int]) -> None:
        """The table from its beginning; the rest is empty."""
        for index in range(TABLE):
            key = keys[index] if index < len(keys) else 0
            file = self.port(device) / f"pkeys/{index}"
            text = f"0x{key:04x}\n"
            if not file.exists() or file.read_text() != text:
                self._set(file, text)

    def clear(self) -> None:
        """No adapter at all."""
        for folder in ("class", "devices"):
            shutil.rmtree(self.root / folder, ignore_errors=True)
        (self.root / "class/infiniband").mkdir(parents=True)
