"""Which PCI function stands for which index of the GPU resource: a file of the node.

One line for each, ``INDEX ADDRESS``, in the order of gres.conf; ``#`` begins a
comment.  Slurm knows indexes alone, and device nodes that stand for functions
on vfio-pci say nothing of where these are.
"""

from __future__ import annotations

from pathlib import Path

from vhpc_slurm.errors import NodeError
from vhpc_slurm.node.pci import ADDRESS

LIMIT = 1 << 16


def read(path: Path) -> tuple[str, ...]:
    """Addresses by index; none without the file.

    Raises:
        NodeError: it cannot be read, or is not such a list from 0 on without gaps.
    """
    try:
        with path.open("rb") as file:
            lines = file.read(LIMIT).decode("ascii", errors="replace").splitlines()
    except FileNotFoundError:
        return ()
    except OSError as err:
        raise NodeError(f"cannot read {path}", str(err)) from err
    found: list[str] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or words[0] != str(len(found)) or not ADDRESS.fullmatch(words[1]):
            raise NodeError(
                f"line {number} of {path} is not valid",
                repr(line[:80]),
                f"'{len(found)} 0000:1b:00.0' or the like is expected",
            )
        found.append(words[1])
    return tuple(found)
