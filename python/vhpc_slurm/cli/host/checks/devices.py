# SPDX-License-Identifier: Apache-2.0
"""GPUs and virtual functions of a compute node: does slurm.conf agree with the hardware?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from vhpc_slurm.cli.host.checks import CheckResult, error, gpudirect, gpumodels, nvswitch, ok, warn
from vhpc_slurm.config import Config
from vhpc_slurm.device import NVIDIA, HostDevice, NodeDevices, classify
from vhpc_slurm.errors import VhpcError
from vhpc_slurm.hardware import PciFunction
from vhpc_slurm.node.devices import classes, gpumap, quarantine, scrub, setup
from vhpc_slurm.node.devices import mig as migmode
from vhpc_slurm.node.devices.preflight import VFIO, CheckInput
from vhpc_slurm.node.devices.vf_drivers import ARPHRD_ETHER
from vhpc_slurm.node.host import inventory, sysfs
from vhpc_slurm.node.resource import reservations
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.placement.devices import is_allowed, of_map, places_of, pool
from vhpc_slurm.placement.usage import fold
from vhpc_slurm.slurm.port import NodeResources

PORT_ACTIVE = "4:"  # drivers/infiniband/core/sysfs.c


def check(
    config: Config, node: str, slurm: NodeResources, *, root: bool, qemu: int = 0
) -> Iterator[CheckResult]:
    """Results; none on a node without GPUs and virtual functions, in hardware, slurm.conf and vhpc.toml.

    Args:
        config: the configuration.
        node: this node's name.
        slurm: what slurm.conf gives the node; without GRES when Slurm did not answer.
        root: whether the quarantine can be read.
        qemu: version of QEMU; 0 if unknown.
    """
    path = Path(config.placement.gpu_map)
    try:
        gpus, types = gpumap.read_gpu_map(path), gpumap.types(path)
        host = inventory.read_inventory(node, config)
        records = quarantine.read_records(Layout(config)) if root else ()
    except VhpcError as err:
        yield error("devices.map", err.line(), "see vhpc.toml(5)")
        return
    for remark in host.remarks:
        yield warn("devices.pci", remark, "compare with lspci; no guest gets this device")
    node_devices = NodeDevices(gpus, parents=classes.parents(Layout(config)))
    places = places_of(host, node_devices)
    slurm_gpus = slurm.gres_count(config.placement.gpu_gres)
    yield from gpu_map(path, gpus, places, slurm_gpus, config, dict(node_devices.parents))
    vfs = pool(host, node_devices)
    slurm_vfs = slurm.gres_count(config.placement.vf_gres)
    if vfs or slurm_vfs:
        good = len([vf for vf in vfs if vf.key not in {record.key for record in records}])
        yield functions_of(good, slurm_vfs, config.placement.vf_gres)
    if vfs:
        yield adapters(sorted({vf.place.physfn for vf in vfs}), config.host.sysfs_root)
    mapped = (of_map(key, places.get(key), config) for key in gpus)
    of_slurm = [one for one in mapped if one is not None]
    whole = [one for one in of_slurm if one.key not in types] + list(vfs)
    yield from types_offered(of_slurm, types, config)
    cards = [one for one in whole if one.traits.indexed]
    yield from gpudirect.check(config.host.sysfs_root, host, cards, vfs, qemu)
    if behind := [one.place for one in (*of_slurm, *vfs) if one.traits.iommu]:
        yield iommu(behind)
    if whole:
        yield vfio(config.host.sysfs_root)
    for vendor in sorted({one.place.vendor for one in cards}):
        numbers = {one.key: one.place.device for one in cards if one.place.vendor == vendor}
        yield clearing(config, vendor, numbers)
    yield from gpumodels.check(config.host.sysfs_root, [one.place for one in cards])
    lasting = [one.key for one in whole if migmode.lasts(one.place.vendor, one.place.device)]
    if lasting and not (scrub.tool() or config.devices.gpu_scrub):
        yield mig(lasting)
    held = fold(reservations.live(Layout(config))).devices if root else gpus
    yield from nvswitch.check(config, gpus, [key for key in gpus if key not in held])
    if gpus:
        yield nodes(gpus, setup.GPU_NODES)
    if records:
        names = ", ".join(f"{record.key} ({record.reason})" for record in records)
        yield warn("devices.quarantine", f"in quarantine: {names}", "vhpc devices clear ADDRESS")


def gpu_map(
    path: Path,
    gpus: Sequence[str],
    places: Mapping[str, PciFunction],
    slurm: int | None,
    config: Config,
    parents: Mapping[str, str],
) -> Iterator[CheckResult]:
    """Whether the map lists existing GPUs, each once, as many as slurm.conf has.

    ``parents`` has the function of each device of the map that is not one itself.
    """
    found = [classify(key, place, indexed=True) for key, place in places.items()]
    there = [one.key for one in found if one is not None and one.traits.plausible(one.place)]
    if not gpus:
        if slurm:
            yield error(
                "devices.map",
                f"Slurm allocates {slurm} GPUs of this node, but {path} lists none",
                "write a line INDEX ADDRESS for each GPU, in the order of gres.conf",
            )
        return
    wrong = [
        key for key in gpus if key not in there and not (key in places and is_allowed(places[key], config))
    ]
    twice = sorted({address for address in gpus if gpus.count(address) > 1})
    if wrong or twice:
        what = "; ".join(
            [
                *dict.fromkeys(f"{parents.get(key, key)} is not a GPU of this node" for key in wrong),
                *(f"{address} is listed twice" for address in twice),
            ]
        )
        yield error("devices.map", f"{path}: {what}", "compare it with lspci -D")
    elif slurm is not None and slurm != len(gpus):
        yield error(
            "devices.map",
            f"{path} lists {len(gpus)} GPUs, but slurm.conf has {slurm}",
            "make gres.conf and the map list the same GPUs, line by line",
        )
    else:
        used = {*gpus, *parents.values(), *(places[key].physfn for key in gpus)}
        left = [key for key in there if key not in used and not places[key].physfn]
        more = f"; not listed: {', '.join(left)}" if left else ""
        yield ok("devices.map", f"{path} lists {len(gpus)} GPUs" + more)


def types_offered(
    found: Sequence[HostDevice], types: Mapping[str, str], config: Config
) -> Iterator[CheckResult]:
    """Whether drivers offer the types of mdevs and vGPUs that the map names, enough for all at once."""
    keys = frozenset(one.key for one in found)
    case = CheckInput(config.host.sysfs_root, config.devices, keys, {}, types=types)
    wrong: dict[str, str] = {}
    for one in found:
        try:
            classes.of(one.device_class).offered(case, one.key)
        except VhpcError as err:
            wrong[f"{err.what}: {err.why}" if err.why else err.what] = err.hint
    if wrong:
        yield error("devices.types", "; ".join(wrong), "; ".join(dict.fromkeys(wrong.values())))
    elif types:
        yield ok("devices.types", f"{len(types)} mediated devices and vGPUs can be created")


def mig(addresses: Sequence[str]) -> CheckResult:
    """A user with a whole GPU can turn on MIG, and no reset turns it off."""
    return warn(
        "devices.mig",
        f"nothing checks after a job that MIG mode is off: {', '.join(addresses)}",
        "install NVIDIA's gpu-admin-tools, whose nvidia_gpu_tools.py ends it",
    )


def functions_of(good: int, slurm: int | None, gres: str) -> CheckResult:
    """Whether there are as many usable virtual functions as slurm.conf has."""
    if slurm is not None and good < slurm:
        return error(
            "devices.vfs",
            f"slurm.conf has {slurm} {gres}, but only {good} virtual functions are usable",
            "see devices.virtual_functions and vhpc node-setup; vhpc devices shows what is in quarantine",
        )
    return ok("devices.vfs", f"{good} virtual functions, slurm.conf has {'none' if slurm is None else slurm}")


def adapters(addresses: Sequence[str], sysfs_root: str) -> CheckResult:
    """Whether the physical functions have a link: without it their virtual functions reach nothing."""
    off, hints = [], []
    for address in addresses:
        pf = f"{sysfs_root}/bus/pci/devices/{address}"
        for name in sysfs.listing(f"{pf}/net"):
            # an IPoIB interface may be off while its port works
            ethernet = sysfs.text_or_empty(f"{pf}/net/{name}/type") == ARPHRD_ETHER
            if ethernet and sysfs.interface_up(f"{pf}/net/{name}") is False:
                off.append(f"interface {name} of {address} is down")
                hints.append(f"run at each boot: ip link set dev {name} up")
        for hca in sysfs.listing(f"{pf}/infiniband"):
            for port in sysfs.listing(f"{pf}/infiniband/{hca}/ports"):
                state = sysfs.text_or_empty(f"{pf}/infiniband/{hca}/ports/{port}/state")
                if state and not state.startswith(PORT_ACTIVE):
                    off.append(f"port {port} of {hca} is {state.partition(': ')[2] or state}")
                    hints.append("check its cable and the subnet manager with ibstat")
    if off:
        return warn("devices.adapters", "; ".join(off), "; ".join(dict.fromkeys(hints)))
    return ok("devices.adapters", f"{len(addresses)} adapters with virtual functions have a link")


def iommu(devices: Sequence[PciFunction]) -> CheckResult:
    """Whether every device is behind an IOMMU."""
    off = [function.address for function in devices if function.iommu_group is None]
    if off:
        return error(
            "devices.iommu",
            f"without an IOMMU group: {', '.join(off)}",
            "boot with intel_iommu=on or amd_iommu=on, and enable it in the firmware",
        )
    return ok("devices.iommu", f"{len(devices)} devices in {len({d.iommu_group for d in devices})} groups")


def vfio(sysfs_root: str) -> CheckResult:
    """Whether vfio-pci is loaded."""
    if sysfs.listing(f"{sysfs_root}/bus/pci/drivers/{VFIO}"):
        return ok("devices.vfio", f"{VFIO} is loaded")
    hint = f"modprobe {VFIO}, and list it in /etc/modules-load.d"
    return error("devices.vfio", f"the driver {VFIO} is not loaded", hint)


def clearing(config: Config, vendor: int, gpus: Mapping[str, int]) -> CheckResult:
    """Whether a program clears the memory of a vendor's GPUs between guests; ``gpus`` have device numbers."""
    commands = {key: scrub.command(config.devices, "ADDRESS", vendor, gpus[key]) for key in gpus}
    if left := [key for key, argv in commands.items() if not argv]:
        helps = vendor == NVIDIA and all(gpus[key] >= scrub.TURING for key in left)
        tool = "install NVIDIA's gpu-admin-tools, or " if helps else ""
        return warn(
            "devices.clearing",
            f"only a reset clears GPUs between jobs, which need not clear their memory: {', '.join(left)}",
            f"{tool}set devices.gpu_scrub",
        )
    argv = next(iter(commands.values()))
    if not Path(argv[0]).is_file():
        return error("devices.clearing", f"{argv[0]} does not exist", "see devices.gpu_scrub in vhpc.toml(5)")
    return ok("devices.clearing", " ".join(argv))


def nodes(gpus: Sequence[str], folder: Path) -> CheckResult:
    """Whether the device nodes for gres.conf exist."""
    missing = [f"gpu{index}" for index in range(len(gpus)) if not (folder / f"gpu{index}").is_char_device()]
    if missing:
        hint = "vhpc node-setup; systemctl enable vhpc-node-setup.service"
        return warn("devices.nodes", f"{folder} lacks {', '.join(missing)}", hint)
    return ok("devices.nodes", f"{folder} has a device node for each GPU")
