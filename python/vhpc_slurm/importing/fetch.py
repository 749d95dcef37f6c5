# SPDX-License-Identifier: Apache-2.0
"""Fetches a container from a registry: skopeo, confined, into a folder.

skopeo knows registries, credentials, mirrors and signature policies
(containers-policy.json(5)); the site configures it in /etc/containers. It has the network and
the user's registry credentials, but sees none of the user's files.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from vhpc_slurm.errors import UserError
from vhpc_slurm.importing.sandbox import confined
from vhpc_slurm.model import DIGEST
from vhpc_slurm.terminal import one_line

REFERENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,511}\Z", re.ASCII)
INSPECTED_MAX = 64 << 20
"""Bytes of a file that a program may write while it only inspects a container."""
TEMPORARY = ("/tmp", "/var/tmp")  # noqa: S108 - folders of the sandbox
SETTINGS = ("/etc/containers", "/etc/hosts", "/etc/nsswitch.conf", "/etc/resolv.conf", "/etc/ssl")
PASSED = ("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "https_proxy", "http_proxy", "no_proxy")
CERTIFICATES = "SSL_CERT_FILE"
POLL_S, PROGRESS_S = 0.1, 2.0
TIME_TO_END_S = 10.0


def fetch(
    reference: str, folder: Path, max_bytes: int, timeout_s: float, progress: Callable[[str], None]
) -> None:
    """Fetch the image for linux on amd64 as a folder of skopeo's format ``dir``.

    Args:
        reference: what follows ``docker://``.
        folder: an empty folder.
        max_bytes: of all files, and of each.
        timeout_s: seconds.
        progress: gets a line every two seconds.

    Raises:
        UserError: the registry has no such image, refuses, or sends too much or too slowly; or a
            tool is missing.
    """
    what = _checked(reference)
    with tempfile.TemporaryFile() as said:
        with subprocess.Popen(
            _skopeo(folder, max_bytes, "copy", "--quiet", what, "dir:/out"),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        ) as run:
            try:
                _watch(run, what, folder, max_bytes, time.monotonic() + timeout_s, progress)
            finally:
                run.kill()
        if run.returncode != 0:
            raise UserError(f"cannot fetch {what}", _reason(said, "skopeo failed"))


def registry_digest(reference: str, timeout_s: float) -> str:
    """The digest of an image's manifest, or of its index; arguments and errors as ``fetch``."""
    what = _checked(reference)
    with tempfile.TemporaryDirectory(prefix="vhpc-") as folder, tempfile.TemporaryFile() as said:
        argv = _skopeo(Path(folder), INSPECTED_MAX, "inspect", "--no-tags", "--format", "{{.Digest}}", what)
        try:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=said,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"cannot find {what}", "its registry does not answer in time") from None
        digest = done.stdout[:200].decode("ascii", "replace").strip()
        if done.returncode != 0 or not DIGEST.match(digest):
            raise UserError(f"cannot find {what}", _reason(said, "skopeo gave no digest"))
    return digest


def _checked(reference: str) -> str:
    """``docker://REFERENCE``; UserError if it has another form, or a tool is missing."""
    what = f"docker://{reference}"
    if not REFERENCE.match(reference):
        raise UserError(f"cannot fetch {what[:200]!r}", "it is not [REGISTRY/]NAME[:TAG|@DIGEST]")
    for tool, package in (("bwrap", "bubblewrap"), ("skopeo", "skopeo")):
        if shutil.which(tool) is None:
            raise UserError(f"cannot fetch {what}", f"{tool} is missing", f"install the package {package}")
    return what


def _reason(said: IO[bytes], otherwise: str) -> str:
    """The message in the last line of skopeo's log, or ``otherwise`` if it is empty."""
    said.seek(0)
    lines = said.read(20000).decode("utf-8", "replace").strip().splitlines()
    line = lines[-1] if lines else otherwise
    found = re.search(r'msg="((?:[^"\\]|\\.)*)"', line)
    return one_line((found[1].replace('\\"', '"') if found else line)[:400])


def _watch(
    run: subprocess.Popen[bytes],
    what: str,
    folder: Path,
    max_bytes: int,
    until: float,
    progress: Callable[[str], None],
) -> None:
    told = time.monotonic()
    while run.poll() is None:
        time.sleep(POLL_S)
        now = time.monotonic()
        size = sum(_size(path) for path in folder.iterdir())
        if size > max_bytes:
            raise UserError(f"cannot fetch {what}", f"it has more than {max_bytes >> 20} MiB")
        if now > until:
            raise UserError(
                f"cannot fetch {what}", "it took too long", "images.import_timeout_s is the limit"
            )
        if now - told >= PROGRESS_S:
            progress(f"fetched {size >> 20} MiB")
            told = now


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def _skopeo(folder: Path, max_bytes: int, command: str, *arguments: str) -> list[str]:
    """A command of skopeo in its sandbox, in which ``folder`` is ``/out``."""
    argv = [*confined(network=True), "--setenv", "HOME", "/out"]
    for path in TEMPORARY:
        argv += ["--tmpfs", path]
    for path in SETTINGS:
        argv += ["--ro-bind-try", path, path]
    for name in PASSED:
        if name in os.environ:
            argv += ["--setenv", name, os.environ[name]]
    if bundle := os.environ.get(CERTIFICATES):
        argv += ["--ro-bind-try", bundle, "/certificates", "--setenv", CERTIFICATES, "/certificates"]
    authorization = _authorization()
    if authorization is not None:
        argv += ["--ro-bind", str(authorization), "/auth.json"]
    argv += ["--bind", str(folder), "/out", "--"]
    argv += ["prlimit", "--core=0", f"--fsize={max_bytes}", "skopeo", "--tmpdir", "/out"]
    argv += ["--override-os", "linux", "--override-arch", "amd64", command]
    argv += ["--authfile", "/auth.json"] if authorization is not None else []
    return [*argv, *arguments]


def _authorization() -> Path | None:
    """The user's credentials, where containers-auth.json(5) says that they are."""
    named = os.environ.get("REGISTRY_AUTH_FILE")
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    docker = os.environ.get("DOCKER_CONFIG") or str(Path.home() / ".docker")
    places = [named] if named else [f"{runtime}/containers/auth.json", f"{docker}/config.json"]
    return next((Path(place) for place in places if Path(place).is_file()), None)
