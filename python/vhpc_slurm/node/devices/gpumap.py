# SPDX-License-Identifier: Apache-2.0
"""The GPU map: a file of the node with the device of each GPU index of Slurm.

One line per GPU, in the order of gres.conf; ``#`` begins a comment::

    INDEX ADDRESS [MODULE]       a whole PCI function; MODULE is the GPU's name in the Fabric Manager
    INDEX ADDRESS mdev=TYPE      an mdev that a job's Prolog creates, of a type of mdev_supported_types
    INDEX ADDRESS vgpu=TYPE      a virtual function that becomes a vGPU, of a type of creatable_vgpu_types

Slurm only knows indexes, and the device files of functions on vfio-pci do not
contain their addresses.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from vhpc_slurm.device import mdev_key
from vhpc_slurm.errors import NodeError
from vhpc_slurm.hardware import PCI_ADDRESS
from vhpc_slurm.record import Record

LIMIT = 1 << 16
MDEV, VGPU = "mdev", "vgpu"
_LAST = re.compile(r"([0-9]+)|(mdev|vgpu)=([A-Za-z0-9][A-Za-z0-9._+-]{0,63})", re.ASCII)


class MapLine(Record, frozen=True):
    """A device of the map.

    Attributes:
        key: of the device.
        address: of the PCI function that it is, or that has it.
        module: of the GPU in the Fabric Manager; None if the line has none.
        maker: ``mdev`` or ``vgpu``; empty for a whole function.
        type: what the device becomes for a job; empty for a whole function.
    """

    key: str
    address: str
    module: int | None = None
    maker: str = ""
    type: str = ""


def read_gpu_map(path: Path) -> tuple[str, ...]:
    """Keys by index; none without the file.

    Raises:
        NodeError: it cannot be read, is invalid, or its indexes are not 0, 1, 2, ...
    """
    return tuple(line.key for line in _lines(path))


def modules(path: Path) -> dict[str, int]:
    """Modules by key, of GPUs that have one; raises as ``read_gpu_map``."""
    return {line.key: line.module for line in _lines(path) if line.module is not None}


def types(path: Path, maker: str = "") -> dict[str, str]:
    """Types by key, of devices that have one, or only of those of a maker; raises as ``read_gpu_map``."""
    return {line.key: line.type for line in _lines(path) if line.type and maker in ("", line.maker)}


def _lines(path: Path) -> list[MapLine]:
    try:
        with path.open("rb") as file:
            lines = file.read(LIMIT).decode("ascii", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as err:
        raise NodeError(f"cannot read {path}", str(err)) from err
    found: list[MapLine] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        last = _LAST.fullmatch(words[2]) if len(words) == 3 else None
        right = len(words) == 2 or last
        if not right or words[0] != str(len(found)) or not PCI_ADDRESS.fullmatch(words[1]):
            raise NodeError(
                f"line {number} of {path} is not valid",
                repr(line[:80]),
                f"'{len(found)} 0000:1b:00.0' is an example of a valid line",
            )
        found.append(_line(words[1], last, found))
    _check_parents(path, found)
    return found


def _line(address: str, last: re.Match[str] | None, above: Sequence[MapLine]) -> MapLine:
    if last is None or last[1]:
        return MapLine(address, address, int(last[1]) if last else None)
    key = address
    if last[2] == MDEV:
        key = mdev_key(address, sum(line.maker == MDEV and line.address == address for line in above))
    return MapLine(key, address, maker=last[2], type=last[3])


def _check_parents(path: Path, lines: Sequence[MapLine]) -> None:
    """A function with mdevs must not be given away as a whole: two jobs would share it."""
    parents = {line.address for line in lines if line.maker == MDEV}
    for index, line in enumerate(lines):
        if line.maker != MDEV and line.address in parents:
            raise NodeError(
                f"{path} lists {line.address} with mdevs and, as index {index}, without",
                "two jobs would share it",
                "remove one of the two",
            )
