# SPDX-License-Identifier: Apache-2.0
"""NVSwitch partitions of a node: Fabric Manager, GPU map, and the drivers of images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from vhpc_slurm.catalog import site_catalog
from vhpc_slurm.cli.host.checks import CheckResult, error, ok, warn
from vhpc_slurm.config import Config
from vhpc_slurm.errors import NodeError, VhpcError
from vhpc_slurm.node.devices import gpumap, mig, nvswitch
from vhpc_slurm.node.host.attribute import Until

CHECK = "devices.nvswitch"
SHOWN = 5


def check(config: Config, gpus: Sequence[str], idle: Sequence[str]) -> Iterator[CheckResult]:
    """Results; none without ``devices.fmpm``.

    Args:
        config: the configuration.
        gpus: keys of the GPU map.
        idle: those that no job holds, as far as that is known.
    """
    if not config.devices.fmpm or not gpus:
        return
    path = Path(config.placement.gpu_map)
    parts, modules = gpumap.types(path), gpumap.modules(path)
    if parts:
        why, hint = nvswitch.DIVIDED
        yield error(CHECK, f"{path} has {len(parts)} parts of GPUs: {why}", hint)
        return
    if nameless := [key for key in gpus if key not in modules]:
        yield error(
            CHECK,
            f"{path} has no module for {', '.join(nameless)}",
            "write it after the address, as nvidia-smi -q shows it: INDEX ADDRESS MODULE",
        )
        return
    try:
        partitions = nvswitch.Fmpm(config.devices).partitions()
        version = nvswitch.version(config.devices)
    except NodeError as err:
        yield error(CHECK, f"{err.what}: {err.why}", err.hint)
        return
    joined = frozenset[int]().union(*(one.modules for one in partitions))
    if alone := [key for key in gpus if modules[key] not in joined]:
        yield error(
            CHECK,
            f"no NVSwitch partition has {', '.join(f'{key} (module {modules[key]})' for key in alone)}",
            "compare the modules in the map with nvidia-smi -q, and with fmpm -l",
        )
        return
    until = Until(config.devices.timeout_s)
    for key in idle:
        try:
            mig.check(config.host.sysfs_root, key, until)
        except NodeError as err:
            yield error(CHECK, f"{err.what}: {err.why}", err.hint)
    yield _drivers(config, len(partitions), version)


def _drivers(config: Config, partitions: int, version: str) -> CheckResult:
    """Whether all images with NVIDIA's driver have the version of the Fabric Manager."""
    if not version:
        return warn(
            CHECK,
            f"{partitions} NVSwitch partitions; the version of the Fabric Manager is unknown, so images with "
            "another driver are not refused",
            "set devices.fabric_manager",
        )
    try:
        images = [one.identity for one in site_catalog(config.images).images() if one.identity]
    except (VhpcError, OSError):
        images = []  # another check reports it
    has = {str(one.ref): dict(one.manifest.driver_versions).get(nvswitch.MODULE, "") for one in images}
    wrong = [f"{name} ({driver})" for name, driver in has.items() if driver not in ("", version)]
    if wrong:
        more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        return warn(
            CHECK,
            f"the Fabric Manager has version {version}; images with another NVIDIA driver are refused here: "
            f"{', '.join(wrong[:SHOWN])}{more}",
            f'build them with that driver; images.gpu_drivers = ["{nvswitch.MODULE}=={version}"] refuses '
            "them earlier",
        )
    return ok(CHECK, f"{partitions} NVSwitch partitions, Fabric Manager {version}")
