# SPDX-License-Identifier: Apache-2.0
"""The hash tree of a root, for dm-verity: the guest's kernel checks each block that it reads.

veritysetup appends the tree to the root's own file. Algorithm, block size and the empty salt are
fixed, so that equal roots have equal trees; there is no superblock, because nothing in it would
be used: vhpc-init gets all values from the kernel command line (docs/image-format.md).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from vhpc_slurm.bootfiles.errors import BootFileError
from vhpc_slurm.terminal import last_line

TOOL, PACKAGE = "veritysetup", "cryptsetup-bin"
SEARCH = "/usr/sbin:/usr/bin:/sbin:/bin"
ALGORITHM, BLOCK = "sha256", 4096
ROOT_HASH = re.compile(r"^Root hash:\s*([0-9a-f]{64})$", re.MULTILINE)


def find_tool() -> str | None:
    """Path of veritysetup; None if it is not installed. sbin is not in the PATH of users."""
    return shutil.which(TOOL, path=SEARCH)


def append_tree(root: Path) -> dict[str, Any]:
    """Append a hash tree to a root file system; equal roots get equal trees.

    Args:
        root: the file; filled with zeros to whole blocks first.

    Returns:
        the manifest's key ``verity``.

    Raises:
        BootFileError: veritysetup is missing or failed.
        OSError: the file cannot be changed.
    """
    tool = find_tool()
    if tool is None:
        raise BootFileError(f"{TOOL} is missing", f"install the package {PACKAGE}")
    blocks = -(-root.stat().st_size // BLOCK)
    size = blocks * BLOCK
    os.truncate(root, size)
    argv = [
        *(tool, "format", "--no-superblock", "--format=1", f"--hash={ALGORITHM}", "--salt=-"),
        *(f"--data-block-size={BLOCK}", f"--hash-block-size={BLOCK}"),
        *(f"--data-blocks={blocks}", f"--hash-offset={size}", str(root), str(root)),
    ]
    # No time limit: an import's sandbox has one, and a build waits for all its tools.  SIGXFSZ, which
    # Python ignores, would end it beyond the limit of a file's size without a word.
    done = subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={"LC_ALL": "C.UTF-8"},
        restore_signals=False,
        check=False,
    )
    said = done.stdout.decode("utf-8", "replace")
    found = ROOT_HASH.search(said)
    if done.returncode != 0 or found is None:
        raise BootFileError(f"{TOOL} ended with status {done.returncode}", last_line(said))
    return {"algorithm": ALGORITHM, "data_size": size, "root_hash": found[1]}
