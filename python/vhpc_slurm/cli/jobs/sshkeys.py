# SPDX-License-Identifier: Apache-2.0
"""Keys of `vhpc ssh`: one pair for all guests of the user, and one for the user, made once.

They open nothing alone: sshd runs in a step of the job, which only the job's owner can start.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from vhpc_slurm.errors import UserError
from vhpc_slurm.terminal import one_line

NAME = "vhpc"
"""Name of all guests in known_hosts."""
MAKE_S = 60.0
READ_MAX = 1 << 20
_FILES = ("host_key", "host_key.pub", "id_ed25519", "id_ed25519.pub", "known_hosts")


@dataclass(frozen=True)
class Keys:
    """The folder of keys, and the user's own authorized_keys."""

    folder: Path
    authorized: Path

    @property
    def identity(self) -> Path:
        """The user's private key."""
        return self.folder / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        """The guests' public key, as ssh reads it."""
        return self.folder / "known_hosts"

    def host_public(self) -> str:
        """Type and key of the guests' public key."""
        return " ".join(_read(self.folder / "host_key.pub").split()[:2])

    def server_input(self) -> bytes:
        """The keys as the script in a guest reads them: host key, ".", public keys of the user, "."."""
        public = _read(self.folder / "id_ed25519.pub")
        with contextlib.suppress(UserError):  # the made key is enough
            public += "\n" + _read(self.authorized)
        lines = [line.strip() for line in public.splitlines()]
        kept = [line for line in lines if line not in ("", ".") and not line.startswith("#")]
        return "\n".join([_read(self.folder / "host_key").strip(), ".", *kept, ".", ""]).encode()


def of_user(home: Path | None = None) -> Keys:
    """The user's keys, which the first call makes.

    Raises:
        UserError: they cannot be made, are incomplete, or other users can read them.
    """
    home = Path.home() if home is None else home
    keys = Keys(home / ".config/vhpc/ssh", home / ".ssh/authorized_keys")
    if not keys.folder.exists():
        try:
            _make(keys.folder)
        except OSError as err:
            raise UserError(f"cannot make keys in {keys.folder}", err.strerror or str(err)) from err
    for path in (keys.folder, *(keys.folder / name for name in _FILES)):
        _check(path, keys.folder)
    return keys


def _check(path: Path, folder: Path) -> None:
    hint = f"remove {folder}; the next vhpc ssh makes new keys"
    try:
        found = path.stat()
    except OSError as err:
        raise UserError(f"cannot use {path}", err.strerror or str(err), hint) from err
    if found.st_uid != os.geteuid():
        raise UserError(f"cannot use {path}", "it belongs to another user", hint)
    if found.st_mode & 0o077 and not stat.S_ISREG(found.st_mode):
        raise UserError(f"other users can use {path}", "it must be yours alone", f"run: chmod 700 {path}")
    if found.st_mode & 0o077:
        raise UserError(f"other users can use {path}", "it must be yours alone", f"run: chmod 600 {path}")


def _make(folder: Path) -> None:
    """Make all files in a folder of another name, and rename it: another command may do the same."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".ssh-", dir=folder.parent))
    try:
        _generate(made / "host_key", "guests of vhpc")
        _generate(made / "id_ed25519", "vhpc ssh")
        (made / "known_hosts").write_text(f"{NAME} {_read(made / 'host_key.pub')}")
        for name in _FILES:
            (made / name).chmod(0o600)
        with contextlib.suppress(OSError):
            made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _generate(path: Path, comment: str) -> None:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=MAKE_S
        )
    except (OSError, subprocess.TimeoutExpired) as err:
        raise UserError(
            "cannot run ssh-keygen", getattr(err, "strerror", None) or str(err), "install OpenSSH's client"
        ) from err
    if done.returncode:
        said = one_line((done.stderr or done.stdout).decode("utf-8", "replace").strip())[-300:]
        raise UserError("ssh-keygen failed", said or f"exit status {done.returncode}")


def _read(path: Path) -> str:
    """A small file of text."""
    try:
        with path.open("rb") as file:
            return file.read(READ_MAX).decode("utf-8", "replace")
    except OSError as err:
        raise UserError(f"cannot read {path}", err.strerror or str(err)) from err
