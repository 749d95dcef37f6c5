# SPDX-License-Identifier: Apache-2.0
"""The GPU map: a file of the node with the device of each GPU index of Slurm.

One line per GPU, ``INDEX ADDRESS``, in the order of gres.conf; ``#`` begins a
comment.  The address is the device's key.  A third word is the GPU's module,
its name in the Fabric Manager.
Slurm only knows indexes, and the device files of functions on vfio-pci do not
contain their addresses.
"""

from __future__ import annotations

from pathlib import Path

from vhpc_slurm.device import is_key
from vhpc_slurm.errors import NodeError

LIMIT = 1 << 16


def read_gpu_map(path: Path) -> tuple[str, ...]:
    """Keys by index; none without the file.

    Raises:
        NodeError: it cannot be read, is invalid, or its indexes are not 0, 1, 2, ...
    """
    return tuple(address for address, _ in _entries(path))


def modules(path: Path) -> dict[str, int]:
    """Modules by key, of GPUs that have one; raises as ``read_gpu_map``."""
    return {address: module for address, module in _entries(path) if module is not None}


def _entries(path: Path) -> list[tuple[str, int | None]]:
    try:
        with path.open("rb") as file:
            lines = file.read(LIMIT).decode("ascii", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as err:
        raise NodeError(f"cannot read {path}", str(err)) from err
    found: list[tuple[str, int | None]] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        right = len(words) in (2, 3) and words[0] == str(len(found)) and is_key(words[1])
        if not right or not all(word.isascii() and word.isdecimal() for word in words[2:]):
            raise NodeError(
                f"line {number} of {path} is not valid",
                repr(line[:80]),
                f"'{len(found)} 0000:1b:00.0' is an example of a valid line",
            )
        found.append((words[1], int(words[2]) if len(words) == 3 else None))
    return found
