# SPDX-License-Identifier: Apache-2.0
"""Signatures of images: those of ssh-keygen(1) over a manifest, in the namespace ``vhpc-image``.

A manifest has the digests of all files of its image, so a signature of it covers them. The
permitted signers are in a file of the form ALLOWED SIGNERS of ssh-keygen(1), with names
(principals), validity and namespaces; ssh-keygen also checks certificates and keys on FIDO
devices.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from vhpc_slurm.catalog import Signed
from vhpc_slurm.catalog.armour import ARMOUR, split
from vhpc_slurm.config.images import Images
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.record import Record

NAMESPACE = "vhpc-image"
MAX_PRINCIPALS = 8
NO_PRINCIPAL = "No principal matched."
"""The message of ssh-keygen for an unknown key."""
PROGRAM = "ssh-keygen"
SEARCH = "/usr/bin:/bin:/usr/local/bin"
TIMEOUT_S = 20.0
SIGN_TIMEOUT_S = 120.0
"""A person may have to type a passphrase or to touch a device."""
_CANNOT = "cannot check the signatures of images"
_FDS = "/proc/self/fd/"


class Signers(Record, frozen=True):
    """Principals whose signatures are valid now; ``refused``: why others are not, as one line."""

    principals: tuple[str, ...]
    refused: str = ""


class _Keygen(Record, frozen=True):
    """ssh-keygen with the site's files, as paths that it can open whatever its rights are.

    ``names`` has their paths in vhpc.toml; ``prefix`` is in front of the command.
    """

    allowed: str
    revoked: str
    names: Mapping[str, str]
    prefix: tuple[str, ...]

    def run(self, *arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
        """Exit status, output and last message of ``ssh-keygen -Y``."""
        fds = [int(word.rpartition("/")[2]) for word in arguments if word.startswith(_FDS)]
        command = [*self.prefix, program(), "-Y", *arguments]
        try:
            done = subprocess.run(
                command,
                input=stdin,
                capture_output=True,
                timeout=TIMEOUT_S,
                check=False,
                env={},
                pass_fds=fds,
            )
        except (OSError, subprocess.SubprocessError) as err:
            raise FabricError(_CANNOT, str(err)) from err
        said = _said(done.stderr)
        for path, name in self.names.items():
            said = said.replace(path, name)
        return done.returncode, done.stdout.decode("utf-8", "replace"), said


def check(images: Images, signed: Signed, prefix: Sequence[str] = ()) -> Signers:
    """Find out who has signed a manifest.

    Args:
        images: names the site's files, which this process reads.
        signed: the manifest and its signatures.
        prefix: words in front of the command of ssh-keygen that reduce its rights: it parses a file of
            a user.

    Raises:
        FabricError: the site's files cannot be read, or this host has no ssh-keygen.
    """
    with contextlib.ExitStack() as opened:
        named = [
            (opened.enter_context(_file(_site_file(path))), path) if path else ("", "")
            for path in (images.allowed_signers, images.revoked_signers)
        ]
        (allowed, _), (revoked, _) = named
        keygen = _Keygen(allowed, revoked, {path: name for path, name in named if path}, tuple(prefix))
        found: dict[str, None] = {}
        refused: list[str] = []
        for signature in split(signed.signatures):
            principals, why = _signers(keygen, signed.manifest, signature)
            found.update(dict.fromkeys(principals))
            if not principals:
                refused.append(why)
    return Signers(tuple(found), "; ".join(dict.fromkeys(refused)))


def _site_file(path: str) -> bytes:
    """The content of a file of the site; FabricError if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        why = "it does not exist"
    except OSError as err:
        why = f"it cannot be read: {err.strerror}"
    raise FabricError(_CANNOT, f"{path}: {why}")


def sign(manifest: bytes, key: Path) -> bytes:
    """Sign a manifest with a private key, or with a public key whose private key the ssh-agent has.

    ssh-keygen asks on the terminal for a passphrase.

    Raises:
        UserError: it cannot be done.
    """
    command = [program(), "-Y", "sign", "-q", "-n", NAMESPACE, "-f", str(key)]
    try:
        done = subprocess.run(
            command, input=manifest, capture_output=True, timeout=SIGN_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as err:
        raise UserError(f"cannot sign with {key}", str(err)) from err
    if done.returncode != 0 or not ARMOUR.fullmatch(done.stdout):
        raise UserError(f"cannot sign with {key}", _said(done.stderr) or "ssh-keygen failed")
    return done.stdout


def _signers(keygen: _Keygen, manifest: bytes, signature: bytes) -> tuple[list[str], str]:
    """The principals for whom a signature is valid, and, only if it is valid for no principal, the reason."""
    with _file(signature) as path:
        code, out, why = keygen.run("find-principals", "-s", path, "-f", keygen.allowed)
        if code != 0:
            unknown = "one signature is of a key that images.allowed_signers does not have"
            return [], unknown if why == NO_PRINCIPAL else why
        valid = []
        for name in out.splitlines()[:MAX_PRINCIPALS]:
            verify = ["verify", "-f", keygen.allowed, "-I", name, "-n", NAMESPACE, "-s", path]
            if keygen.revoked:
                verify += ["-r", keygen.revoked]
            code, _, why = keygen.run(*verify, stdin=manifest)
            if code == 0:
                valid.append(name)
    return valid, "" if valid else why or "one signature is not valid, or its key is revoked"


@contextlib.contextmanager
def _file(data: bytes) -> Iterator[str]:
    """A path that child processes can read these bytes from."""
    with os.fdopen(os.memfd_create("vhpc-signature"), "wb") as file:
        file.write(data)
        file.flush()
        yield f"{_FDS}{file.fileno()}"


def _said(stderr: bytes) -> str:
    lines = stderr.decode("utf-8", "replace").strip().splitlines()
    return lines[0].strip() if lines else ""


def program() -> str:
    """Path of ssh-keygen; FabricError if this host has none."""
    found = shutil.which(PROGRAM, path=SEARCH)
    if found is None:
        raise FabricError(
            _CANNOT,
            f"this host has no {PROGRAM}",
            "apt install openssh-client",
        )
    return found
