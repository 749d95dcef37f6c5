"""From the configuration to what it means for the fabric."""

from __future__ import annotations

from pathlib import Path

from vhpc_slurm.config import Fabric
from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric import partitions
from vhpc_slurm.fabric.keys import KeyPool
from vhpc_slurm.fabric.partitions import Partition


def key_pool(fabric: Fabric) -> KeyPool:
    """The keys that may be handed out; FabricError when the range is none."""
    return KeyPool(fabric.pkey_first, fabric.pkey_last, frozenset(fabric.pkey_reserved))


def site_partitions(fabric: Fabric) -> tuple[Partition, ...]:
    """The partitions that the site has beside the jobs'.

    Raises:
        FabricError: the file cannot be read, the linter refuses it, or it has a key of the pool.
    """
    if not fabric.site_partitions:
        return ()
    try:
        data = Path(fabric.site_partitions).read_bytes()
    except OSError as err:
        raise FabricError(f"cannot read {fabric.site_partitions}", err.strerror or str(err)) from err
    found = partitions.parse(data, fabric.site_partitions)
    pool = frozenset(key_pool(fabric).numbers())
    for one in found:
        if one.pkey in pool:
            raise FabricError(
                f"{fabric.site_partitions} has the key {one.pkey:#06x}",
                "it is one of those for jobs",
                "name it in fabric.pkey_reserved, or change fabric.pkey_first and fabric.pkey_last",
            )
        if one.name.startswith("key_"):
            raise FabricError(
                f"{fabric.site_partitions} has the name {one.name}", "jobs' partitions are called so"
            )
    return found[1:]
