# SPDX-License-Identifier: Apache-2.0
"""The hash tree of a root, for dm-verity: the guest's kernel checks each block that it reads.

veritysetup appends the tree to the root's own file.  Algorithm, block size and the empty salt are
fixed, so that equal roots have equal trees; there is no superblock, because nothing in it would
be used: vhpc-init gets all values from the kernel command line (docs/image-format.md).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from vmimages.errors import BuildError
from vmimages.host import output

ALGORITHM = "sha256"
BLOCK = 4096
ROOT_HASH = re.compile(r"^Root hash:\s*([0-9a-f]{64})$", re.MULTILINE)
TIMEOUT_S = 3600.0
"""Far more than the largest root takes: a GiB takes some seconds."""


@dataclass(frozen=True)
class HashTree:
    """The manifest's key ``verity``: bytes of data before the tree, and the hash of the tree's root."""

    data_size: int
    root_hash: str

    def entry(self) -> dict[str, str | int]:
        """The value for the manifest."""
        return {"algorithm": ALGORITHM, "data_size": self.data_size, "root_hash": self.root_hash}


def append_tree(root: Path) -> HashTree:
    """Append a hash tree to a root file system.

    Args:
        root: the file; filled with zeros to whole blocks first.

    Raises:
        BuildError: veritysetup is missing or failed.
        OSError: the file cannot be changed.
    """
    blocks = -(-root.stat().st_size // BLOCK)
    size = blocks * BLOCK
    os.truncate(root, size)
    said = output(
        [
            *("veritysetup", "format", "--no-superblock", "--format=1", f"--hash={ALGORITHM}", "--salt=-"),
            *(f"--data-block-size={BLOCK}", f"--hash-block-size={BLOCK}"),
            *(f"--data-blocks={blocks}", f"--hash-offset={size}", str(root), str(root)),
        ],
        timeout_s=TIMEOUT_S,
    )
    found = ROOT_HASH.search(said.decode("utf-8", "replace"))
    if found is None:
        raise BuildError("veritysetup printed no root hash", said.decode("utf-8", "replace")[-200:].strip())
    return HashTree(size, found[1])
