# SPDX-License-Identifier: Apache-2.0
"""PCI functions, drivers and IOMMU groups that react to writes as the kernel's do.

A ``MachineTree`` says what is there; here it comes to life.  Modelled on Linux
6.12, by file:

========================  ==================================================
``driver_override``       drivers/base/driver.c (driver_set_override), drivers/pci/pci-sysfs.c
``bind``, ``unbind``,     drivers/base/bus.c, drivers/base/dd.c (an empty device
``drivers_probe``         only; EBUSY for a bound one, errors of the probe as they are)
``new_id``, ``remove_id``  drivers/pci/pci-driver.c (EEXIST for a static id; binds what matches)
match, VF autoprobe       drivers/pci/pci-driver.c (pci_match_device, pci_device_can_probe)
``reset``                 drivers/pci/pci-sysfs.c (EINVAL but for 1), drivers/pci/pci.c (ENOTTY)
``reset_method``          drivers/pci/pci.c (5.15 and later; absent without any method)
``sriov_*``               drivers/pci/iov.c (ERANGE, ENOENT without the driver's help, EBUSY unless
                          from or to 0)
vfio-pci's probe          drivers/vfio/pci/vfio_pci_core.c (EBUSY for a PF with VFs, EINVAL without a
                          group), its remove drivers/vfio/vfio_main.c (waits for the user to close)
``aer_dev_*``             drivers/pci/pcie/aer.c (aer_stats_dev_attr: counters of the kernel's own,
                          untouched by resets; names of drivers/pci/pcie/aer.c's tables)
``power/control``         drivers/base/power/sysfs.c; ``d3cold_allowed``: drivers/pci/pci-sysfs.c
========================  ==================================================
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial

from attribute_fs import Attribute, Folder, Link, Stuck, fixed
from fake_pci_device import Device, Driver, aer, fail, ids

DEVICES, DRIVERS = "bus/pci/devices", "bus/pci/drivers"
VFIO = "vfio-pci"
METHODS = ("device_specific", "acpi", "flr", "af_flr", "pm", "bus", "cxl_bus")
COMMAND, BUS_MASTER, MEMORY = 4, 0x4, 0x2
SRIOV_DRIVERS = frozenset(("mlx5_core", "igb", "ixgbe", "i40e", "ice"))  # mlx4_core: by module option alone


class FakePci:
    """All of it.  ``log`` has each write in its order: (path, text without newline)."""

    def __init__(self, tree: Folder) -> None:
        self.tree = tree
        self.devices: dict[str, Device] = {}
        self.drivers: dict[str, Driver] = {}
        self.opened: set[int] = set()  # IOMMU groups that a process has open
        self.log: list[tuple[str, str]] = []
        self.on_vf: Callable[[Device, Device, int], None] = lambda pf, vf, number: None
        self.on_no_vf: Callable[[Device], None] = lambda pf: None
        for name, link in list(tree.folder(DEVICES).entries.items()):
            assert isinstance(link, Link)
            self._adopt(name, os.path.normpath(f"{DEVICES}/{link.target}"))
        for name in ("vfio-pci", "pcieport", *sorted({d.driver for d in self.devices.values()} - {""})):
            self.add_driver(Driver(name))
        for device in self.devices.values():
            if device.driver:
                self._show_driver(device)
                self.drivers[device.driver].ids.add((device.vendor, device.device))
        self.drivers[VFIO].ids.clear()
        self.drivers[VFIO].probe, self.drivers[VFIO].remove = self._vfio_probe, self._vfio_remove
        tree.put(
            "bus/pci/drivers_probe", self._file("bus/pci/drivers_probe", lambda: "", self._drivers_probe)
        )

    # --- making -----------------------------------------------------------------------

    def add_driver(self, driver: Driver) -> None:
        if driver.name in self.drivers:
            return
        self.drivers[driver.name] = driver
        path = f"{DRIVERS}/{driver.name}"
        for name, store in (
            ("bind", lambda text: self._bind(driver, text)),
            ("unbind", lambda text: self._unbind(driver, text)),
            ("new_id", lambda text: self._new_id(driver, text)),
            ("remove_id", lambda text: self._remove_id(driver, text)),
        ):
            self.tree.put(f"{path}/{name}", self._file(f"{path}/{name}", lambda: "", store))

    def unload(self, name: str) -> None:
        """Take a driver's module away."""
        for device in self.devices.values():
            if device.driver == name:
                self._detach(device)
        del self.drivers[name]
        self.tree.drop(f"{DRIVERS}/{name}")

    def _file(self, path: str, show: Callable[[], bytes | str], store: Callable[[str], None]) -> Attribute:
        def logged(text: str) -> None:
            self.log.append((path, text.rstrip("\n")))
            store(text)

        return Attribute(show, logged)

    def _adopt(self, address: str, path: str) -> Device:
        folder = self.tree.folder(path)

        def old(name: str) -> str:
            node = folder.entries.get(name)
            raw = node.show() if isinstance(node, Attribute) else b""
            return (raw.decode() if isinstance(raw, bytes) else raw).strip()

        def end(name: str) -> str:
            node = folder.entries.get(name)
            return node.target.rpartition("/")[2] if isinstance(node, Link) else ""

        group = end("iommu_group")
        device = Device(
            address,
            path,
            folder,
            int(old("vendor"), 16),
            int(old("device"), 16),
            driver=end("driver"),
            resets=tuple(old("reset_method").split()),
            methods=tuple(old("reset_method").split()),
            group=int(group) if group else None,
            physfn=end("physfn"),
            total_vfs=int(old("sriov_totalvfs") or 0),
        )
        node = folder.entries["config"]
        assert isinstance(node, Attribute)
        device.config[:] = bytearray(node.show())  # type: ignore[arg-type]
        if device.physfn:
            device.config[0:4] = b"\xff" * 4  # a virtual function has no ids of its own
        self.devices[address] = device
        if group:
            self._join(device, int(group))
        device.virtfns = [end(n) for n in sorted(n for n in folder.entries if n.startswith("virtfn"))]
        self._animate(device)
        return device

    def _join(self, device: Device, group: int) -> None:
        device.group = group
        up = "../" * (device.path.count("/") + 1)
        device.folder.entries["iommu_group"] = Link(f"{up}kernel/iommu_groups/{group}")
        self.tree.put(
            f"kernel/iommu_groups/{group}/devices/{device.address}", Link(f"../../../../{device.path}")
        )

    def regroup(self, address: str, group: int | None) -> None:
        """Put a function into another IOMMU group; None: the IOMMU is off."""
        device = self.devices[address]
        self.tree.drop(f"kernel/iommu_groups/{device.group}/devices/{address}")
        del device.folder.entries["iommu_group"]
        device.group = None
        if group is not None:
            self._join(device, group)

    def _animate(self, device: Device) -> None:
        files: dict[str, tuple[Callable[[], bytes | str], Callable[[str], None]]] = {
            "driver_override": (
                lambda: (device.override or "(null)") + "\n",
                lambda t: self._override(device, t),
            ),
            "power_state": (lambda: device.power + "\n", lambda t: self._denied()),
            "d3cold_allowed": (lambda: f"{int(device.d3cold)}\n", lambda t: self._d3cold(device, t)),
            "power/control": (
                lambda: "auto\n" if device.d3cold else "on\n",
                lambda t: self._control(device, t),
            ),
        }
        if device.resets:
            files["reset_method"] = (
                lambda: " ".join(device.methods) + "\n" * bool(device.methods),
                lambda t: self._reset_method(device, t),
            )
            files["reset"] = (lambda: "", lambda t: self._reset(device, t))
        if device.total_vfs:
            files["sriov_numvfs"] = (lambda: f"{len(device.virtfns)}\n", lambda t: self._numvfs(device, t))
            files["sriov_drivers_autoprobe"] = (
                lambda: f"{int(device.autoprobe)}\n",
                lambda t: self._autoprobe(device, t),
            )
        for name, (show, store) in files.items():
            path = f"{DEVICES}/{device.address}/{name}"
            folder, _, last = name.rpartition("/")
            device.folder.folder(folder).entries[last] = self._file(path, show, store)
        device.folder.entries["config"] = Attribute(lambda: bytes(device.config))
        for kind in device.errors:
            device.folder.entries[f"aer_dev_{kind}"] = Attribute(partial(aer, device, kind))

    # --- drivers ----------------------------------------------------------------------

    @staticmethod
    def _lock(device: Device) -> None:
        if device.locked:
            raise Stuck

    @staticmethod
    def _denied() -> None:
        raise fail(errno.EACCES)

    def _find(self, text: str) -> Device:
        device = self.devices.get(text.rstrip("\n"))
        if device is None:
            raise fail(errno.ENODEV)
        self._lock(device)
        return device

    def _override(self, device: Device, text: str) -> None:
        if len(text) >= 4095:
            raise fail(errno.EINVAL)
        self._lock(device)
        device.override = text.partition("\n")[0]

    def _matches(self, driver: Driver, device: Device) -> bool:
        if device.override:
            return device.override == driver.name
        return (device.vendor, device.device) in driver.ids | driver.dynamic

    def _attach(self, driver: Driver, device: Device) -> None:
        if device.driver:
            raise fail(errno.EBUSY)
        if device.physfn and not self.devices[device.physfn].autoprobe and not device.override:
            raise fail(errno.ENODEV)
        driver.probe(device)
        device.driver = driver.name
        self._show_driver(device)

    def _show_driver(self, device: Device) -> None:
        up = "../" * (device.path.count("/") + 1)
        device.folder.entries["driver"] = Link(f"{up}{DRIVERS}/{device.driver}")
        self.tree.folder(f"{DRIVERS}/{device.driver}").entries[device.address] = Link(
            f"../../../../{device.path}"
        )

    def _detach(self, device: Device) -> None:
        driver = self.drivers[device.driver]
        try:
            driver.remove(device)
        except Stuck:
            device.locked = True
            raise
        self.tree.drop(f"{DRIVERS}/{device.driver}/{device.address}")
        del device.folder.entries["driver"]
        device.driver = ""

    def _bind(self, driver: Driver, text: str) -> None:
        device = self._find(text)
        if not self._matches(driver, device):
            raise fail(errno.ENODEV)
        self._attach(driver, device)

    def _unbind(self, driver: Driver, text: str) -> None:
        device = self._find(text)
        if device.driver != driver.name:
            raise fail(errno.ENODEV)
        self._detach(device)

    def _drivers_probe(self, text: str) -> None:
        self._probe(self._find(text))

    def _probe(self, device: Device) -> None:
        """As at hotplug: the first driver that matches and whose probe succeeds; no driver is no error."""
        for driver in list(self.drivers.values()) if not device.driver else ():
            if self._matches(driver, device):
                try:
                    self._attach(driver, device)
                except OSError:
                    continue
                return

    def _new_id(self, driver: Driver, text: str) -> None:
        found = ids(text)
        if found in driver.ids | driver.dynamic:
            raise fail(errno.EEXIST)
        driver.dynamic.add(found)
        for device in self.devices.values():
            if not device.driver and self._matches(driver, device):
                self._probe(device)

    def _remove_id(self, driver: Driver, text: str) -> None:
        found = ids(text)
        if found not in driver.dynamic:
            raise fail(errno.ENODEV)
        driver.dynamic.discard(found)

    def _vfio_probe(self, device: Device) -> None:
        if device.group is None or device.config[0x0E] & 0x7F:
            raise fail(errno.EINVAL)
        if device.virtfns:
            raise fail(errno.EBUSY)

    def _vfio_remove(self, device: Device) -> None:
        if device.group in self.opened:
            raise Stuck

    def open_group(self, group: int | None) -> None:
        """As VFIO_GROUP_SET_CONTAINER: EBUSY unless the whole group is viable."""
        assert group is not None
        members = [device for device in self.devices.values() if device.group == group]
        if group in self.opened or any(m.driver not in ("", VFIO, "pcieport", "pci-stub") for m in members):
            raise fail(errno.EBUSY)
        self.opened.add(group)

    # --- reset and power --------------------------------------------------------------

    def _reset(self, device: Device, text: str) -> None:
        if text.strip() not in ("1", "0x1", "01"):
            raise fail(errno.EINVAL)
        self._lock(device)
        if not device.methods:
            raise fail(errno.ENOTTY)
        device.on_reset(device)
        device.was_reset += 1

    def _reset_method(self, device: Device, text: str) -> None:
        if text.strip() == "default":
            device.methods = device.resets
            return
        names = text.split()
        if any(name not in METHODS or name not in device.resets for name in names):
            raise fail(errno.EINVAL)
        device.methods = tuple(dict.fromkeys(names))

    def _d3cold(self, device: Device, text: str) -> None:
        if not text.strip().isdecimal():
            raise fail(errno.EINVAL)
        device.d3cold = text.strip() != "0"

    def _control(self, device: Device, text: str) -> None:
        if text.strip() not in ("auto", "on"):
            raise fail(errno.EINVAL)
        if text.strip() == "on" and device.power == "D3cold" and not device.locked:
            device.power = "D0"

    # --- SR-IOV -----------------------------------------------------------------------

    def _autoprobe(self, device: Device, text: str) -> None:
        word = text.strip()[:1].lower()
        if word not in ("0", "1", "y", "n"):
            raise fail(errno.EINVAL)
        device.autoprobe = word in ("1", "y")

    def _numvfs(self, device: Device, text: str) -> None:
        try:
            count = int(text, 0)
        except ValueError:
            raise fail(errno.EINVAL) from None
        if not 0 <= count < 1 << 16:
            raise fail(errno.EINVAL)
        if count > device.total_vfs:
            raise fail(errno.ERANGE)
        self._lock(device)
        if count == len(device.virtfns):
            return
        if device.driver not in SRIOV_DRIVERS:
            raise fail(errno.ENOENT)
        if count and device.virtfns:
            raise fail(errno.EBUSY)
        for number in range(count):
            self._make_vf(device, number)
        if not count:
            self._remove_vfs(device)

    def _make_vf(self, pf: Device, number: int) -> None:
        slot, function = divmod(number + 1, 8)
        address = f"{pf.address.rpartition(':')[0]}:{slot:02x}.{function}"
        path = f"{pf.path.rpartition('/')[0]}/{address}"
        folder = self.tree.folder(path)
        for name in ("class", "numa_node", "local_cpus", "local_cpulist", "vendor"):
            folder.entries[name] = pf.folder.entries[name]
        folder.entries["device"] = fixed(f"0x{pf.device + 1:04x}\n")
        folder.entries["reset_method"] = fixed("flr\n")
        folder.entries["resource"] = fixed("")
        config = bytearray(64)
        config[0:4] = pf.vendor.to_bytes(2, "little") + (pf.device + 1).to_bytes(2, "little")
        folder.entries["config"] = fixed(bytes(config))
        folder.entries["physfn"] = Link(f"../{pf.address}")
        pf.folder.entries[f"virtfn{number}"] = Link(f"../{address}")
        up = "../" * 3
        self.tree.put(f"{DEVICES}/{address}", Link(f"{up}{path}"))
        vf = self._adopt(address, path)
        self._join(vf, 1 + max(d.group or 0 for d in self.devices.values()))
        pf.virtfns.append(address)
        self.on_vf(pf, vf, number)
        self._probe(vf)

    def _remove_vfs(self, pf: Device) -> None:
        for number, address in enumerate(pf.virtfns):
            vf = self.devices[address]
            if vf.driver:
                self._detach(vf)
            self.tree.drop(f"kernel/iommu_groups/{vf.group}/devices/{address}")
            self.tree.drop(f"{DEVICES}/{address}")
            self.tree.drop(vf.path)
            del self.devices[address], pf.folder.entries[f"virtfn{number}"]
        pf.virtfns.clear()
        self.on_no_vf(pf)
