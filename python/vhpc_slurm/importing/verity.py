# SPDX-License-Identifier: Apache-2.0
"""The hash tree of a root, for dm-verity; docs/image-format.md has its form.

The worker calls this in the sandbox: standard library only.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from vhpc_slurm.importing.tree import RefusedError

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
        RefusedError: veritysetup is missing or failed.
        OSError: the file cannot be changed.
    """
    tool = find_tool()
    if tool is None:
        raise RefusedError(f"{TOOL} is missing (package {PACKAGE})")
    blocks = -(-root.stat().st_size // BLOCK)
    size = blocks * BLOCK
    os.truncate(root, size)
    argv = [
        *(tool, "format", "--no-superblock", "--format=1", f"--hash={ALGORITHM}", "--salt=-"),
        *(f"--data-block-size={BLOCK}", f"--hash-block-size={BLOCK}"),
        *(f"--data-blocks={blocks}", f"--hash-offset={size}", str(root), str(root)),
    ]
    # No time limit of its own: the sandbox ends when the import's time is over.  SIGXFSZ, which Python
    # ignores, would end it beyond the limit of a file's size without a word.
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
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        why = lines[-1][:300] if lines else "it said nothing"
        raise RefusedError(f"{TOOL} ended with status {done.returncode}: {why}")
    return {"algorithm": ALGORITHM, "data_size": size, "root_hash": found[1]}
