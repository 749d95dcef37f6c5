# SPDX-License-Identifier: Apache-2.0
"""Signatures of images: those of ssh-keygen(1) over a manifest, in the namespace ``vhpc-image``.

A manifest has the digests of all files of its image, so a signature of it covers them. Who may
sign is in a file of the form ALLOWED SIGNERS of ssh-keygen(1), with names (principals),
validity and namespaces; ssh-keygen also checks certificates and keys on FIDO devices.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vhpc_slurm.catalog import Signed
from vhpc_slurm.catalog.armour import ARMOUR, split
from vhpc_slurm.config.images import Images
from vhpc_slurm.errors import FabricError, UserError

NAMESPACE = "vhpc-image"
MAX_PRINCIPALS = 8
NO_PRINCIPAL = "No principal matched."
"""What ssh-keygen says of an unknown key."""
PROGRAM = "ssh-keygen"
SEARCH = "/usr/bin:/bin:/usr/local/bin"
TIMEOUT_S = 20.0
SIGN_TIMEOUT_S = 120.0
"""A person may have to type a passphrase or to touch a device."""


@dataclass(frozen=True)
class Signers:
    """Principals whose signatures are valid now; ``refused``: why others are not, as one line."""

    principals: tuple[str, ...]
    refused: str = ""


def check(images: Images, signed: Signed) -> Signers:
    """Find out who has signed a manifest.

    Raises:
        FabricError: the site's files cannot be read, or this host has no ssh-keygen.
    """
    files = [path for path in (images.allowed_signers, images.revoked_signers) if path]
    for path in files:
        if not os.access(path, os.R_OK):
            why = "it does not exist" if not Path(path).exists() else "it cannot be read"
            raise FabricError("cannot check the signatures of images", f"{path}: {why}")
    found: dict[str, None] = {}
    refused: list[str] = []
    for signature in split(signed.signatures):
        principals, why = _signers(images, signed.manifest, signature)
        found.update(dict.fromkeys(principals))
        if not principals:
            refused.append(why)
    return Signers(tuple(found), "; ".join(dict.fromkeys(refused)))


def sign(manifest: bytes, key: Path) -> bytes:
    """Sign a manifest with a private key, or with a public key whose private key the ssh-agent has.

    ssh-keygen asks on the terminal for a passphrase.

    Raises:
        UserError: it cannot be done.
    """
    command = [_program(), "-Y", "sign", "-q", "-n", NAMESPACE, "-f", str(key)]
    try:
        done = subprocess.run(
            command, input=manifest, capture_output=True, timeout=SIGN_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as err:
        raise UserError(f"cannot sign with {key}", str(err)) from err
    if done.returncode != 0 or not ARMOUR.fullmatch(done.stdout):
        raise UserError(f"cannot sign with {key}", _said(done.stderr) or "ssh-keygen failed")
    return done.stdout


def _signers(images: Images, manifest: bytes, signature: bytes) -> tuple[list[str], str]:
    """The principals for whom a signature is valid, and, only if it is valid for no principal, the reason."""
    with _file(signature) as path:
        code, out, why = _run("find-principals", "-s", path, "-f", images.allowed_signers)
        if code != 0:
            unknown = "one signature is of a key that images.allowed_signers does not have"
            return [], unknown if why == NO_PRINCIPAL else why
        valid = []
        for name in out.decode("utf-8", "replace").splitlines()[:MAX_PRINCIPALS]:
            verify = ["verify", "-f", images.allowed_signers, "-I", name, "-n", NAMESPACE, "-s", path]
            if images.revoked_signers:
                verify += ["-r", images.revoked_signers]
            code, _, why = _run(*verify, stdin=manifest)
            if code == 0:
                valid.append(name)
    return valid, "" if valid else why or "one signature is not valid, or its key is revoked"


@contextlib.contextmanager
def _file(data: bytes) -> Iterator[str]:
    """A path that child processes can read these bytes from."""
    fd = os.memfd_create("signature")
    try:
        os.write(fd, data)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def _run(*arguments: str, stdin: bytes = b"") -> tuple[int, bytes, str]:
    """Exit status, output and last message of ``ssh-keygen -Y``."""
    fds = [int(word.rpartition("/")[2]) for word in arguments if word.startswith("/proc/self/fd/")]
    command = [_program(), "-Y", *arguments]
    try:
        done = subprocess.run(
            command, input=stdin, capture_output=True, timeout=TIMEOUT_S, check=False, env={}, pass_fds=fds
        )
    except (OSError, subprocess.SubprocessError) as err:
        raise FabricError("cannot check the signatures of images", str(err)) from err
    return done.returncode, done.stdout, _said(done.stderr)


def _said(stderr: bytes) -> str:
    lines = stderr.decode("utf-8", "replace").strip().splitlines()
    return lines[0].strip() if lines else ""


def _program() -> str:
    program = shutil.which(PROGRAM, path=SEARCH)
    if program is None:
        raise FabricError(
            "cannot check the signatures of images",
            f"this host has no {PROGRAM}",
            "apt install openssh-client",
        )
    return program
