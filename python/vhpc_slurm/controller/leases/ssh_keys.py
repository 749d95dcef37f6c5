# SPDX-License-Identifier: Apache-2.0
"""New ssh keys for a generation, made by ssh-keygen(1)."""
# Decision: ssh keys are made by vhpcd

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import SshKeys

PROGRAM = "ssh-keygen"
SEARCH = "/usr/bin:/bin:/usr/local/bin"
TIMEOUT_S = 20.0


def make() -> SshKeys:
    """A host key and a user key; takes some milliseconds.

    Raises:
        FabricError: this host has no ssh-keygen, or it fails.
    """
    program = shutil.which(PROGRAM, path=SEARCH)
    if program is None:
        raise FabricError(
            f"vhpcd's host has no {PROGRAM}", "guests get no ssh keys", "apt install openssh-client"
        )
    with tempfile.TemporaryDirectory(prefix="vhpcd-") as folder:
        host, user = (_pair(program, Path(folder) / name) for name in ("host", "user"))
    return SshKeys(*host, *user)


def _pair(program: str, path: Path) -> tuple[str, str]:
    """Private and public key."""
    command = [program, "-q", "-t", "ed25519", "-N", "", "-C", "vhpc", "-f", str(path)]
    try:
        subprocess.run(
            command, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=TIMEOUT_S, env={}
        )
        return path.read_text(), path.with_suffix(".pub").read_text().strip()
    except (OSError, subprocess.SubprocessError) as err:
        said = getattr(err, "stderr", None) or b""
        raise FabricError(f"{PROGRAM} failed", said.decode(errors="replace").strip() or str(err)) from err
