# SPDX-License-Identifier: Apache-2.0
"""Fetches containers and vhpc images from a registry: skopeo, confined, into a folder.

skopeo knows registries, credentials, mirrors and signature policies
(containers-policy.json(5)); the site configures it in /etc/containers. It has the network and
the user's registry credentials, but sees none of the user's files.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from vhpc_slurm.architecture import X86_64, Architecture
from vhpc_slurm.errors import UserError
from vhpc_slurm.importing.sandbox import call_filter, confined
from vhpc_slurm.progress import Amount
from vhpc_slurm.terminal import one_line

REFERENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,511}\Z", re.ASCII)
INSPECTED_MAX = 64 << 20
"""Bytes of a file that a program may write while it only inspects a container."""
TEMPORARY = ("/tmp", "/var/tmp")  # noqa: S108 - folders of the sandbox
SETTINGS = ("/etc/containers", "/etc/hosts", "/etc/nsswitch.conf", "/etc/resolv.conf", "/etc/ssl")
PASSED = ("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "https_proxy", "http_proxy", "no_proxy")
CERTIFICATES = "SSL_CERT_FILE"
MEMORY_MAX = 2 << 30
"""Bytes of memory that skopeo may write to. Not of address space: Go's programs reserve much of that."""
OPEN_MAX, FILES_MAX = 1024, 4096
"""Open files of skopeo, and files that it may have written: layers of a container, and some more."""
POLL_S = 0.1
TIME_TO_END_S = 10.0


def fetch(
    reference: str,
    folder: Path,
    max_bytes: int,
    timeout_s: float,
    progress: Callable[[str], None],
    variant: str = "",
    architecture: Architecture = X86_64,
) -> None:
    """Fetch the image for linux as a folder of skopeo's format ``dir``.

    Args:
        reference: what follows ``docker://``.
        folder: an empty folder.
        max_bytes: of all files, and of each.
        timeout_s: seconds.
        progress: gets a line with the number of bytes, often.
        variant: of the processor, as in ``Source``.
        architecture: of the image.

    Raises:
        UserError: the registry has no such image, refuses, or sends too much or too slowly; or a
            tool is missing.
    """
    before = ("--override-arch", architecture.oci, *(("--override-variant", variant) if variant else ()))
    _copy(reference, folder, max_bytes, timeout_s, _amounts(progress, None), {}, "dir:/out", before=before)


def fetch_artifact(
    reference: str,
    folder: Path,
    present: Mapping[str, Path],
    wanted: int,
    max_bytes: int,
    timeout_s: float,
    progress: Callable[[str], None],
) -> None:
    """Fetch a vhpc image as an OCI layout; other arguments and errors as ``fetch``.

    Args:
        reference: with the digest of its OCI manifest.
        present: sha256 -> a file with a blob's bytes. These blobs are not fetched, and the layout
            does not have them.
        wanted: number of bytes to fetch.
    """
    shown = {f"blobs/sha256/{sha256}": path for sha256, path in present.items()}
    # signatures of containers (policy.json) are checked before, but a layout cannot have them
    options = ["--preserve-digests", "--remove-signatures"]
    amounts = _amounts(progress, wanted)
    _copy(reference, folder, max_bytes, timeout_s, amounts, shown, "oci:/out", *options)


def _amounts(progress: Callable[[str], None], total: int | None) -> Callable[[int], None]:
    return lambda size: progress(Amount("fetched", size, total))


def _copy(
    reference: str,
    folder: Path,
    max_bytes: int,
    timeout_s: float,
    progress: Callable[[int], None],
    shown: Mapping[str, Path],
    target: str,
    *options: str,
    before: tuple[str, ...] = (),
) -> None:
    what = checked(reference)
    with tempfile.TemporaryFile() as said, call_filter(network=True) as seccomp:
        arguments = ("--quiet", *options, what, target)
        argv = skopeo(seccomp, folder, max_bytes, "copy", *arguments, shown=shown, options=before)
        with subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=said, stderr=said, pass_fds=[seccomp]
        ) as run:
            try:
                _watch(run, what, folder, max_bytes, time.monotonic() + timeout_s, progress)
            finally:
                run.kill()
        if run.returncode != 0:
            raise UserError(f"cannot fetch {what}", reason(said, "skopeo failed"))


def registry_manifest(reference: str, timeout_s: float) -> bytes:
    """The bytes of a manifest or an index, at most INSPECTED_MAX; arguments and errors as ``fetch``."""
    what = checked(reference)
    with (
        tempfile.TemporaryDirectory(prefix="vhpc-") as folder,
        tempfile.TemporaryFile() as said,
        tempfile.TemporaryFile() as answer,
        call_filter(network=True) as seccomp,
    ):
        argv = skopeo(seccomp, Path(folder), INSPECTED_MAX, "inspect", "--raw", what)
        try:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=answer,
                stderr=said,
                timeout=timeout_s,
                check=False,
                pass_fds=[seccomp],
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"cannot find {what}", "its registry does not answer in time") from None
        answer.seek(0)
        found = answer.read(INSPECTED_MAX)
        if done.returncode != 0 or not found:
            raise UserError(f"cannot find {what}", reason(said, "skopeo gave no manifest"))
    return found


def checked(reference: str) -> str:
    """``docker://REFERENCE``; UserError if it has another form, or a tool is missing."""
    what = f"docker://{reference}"
    if not REFERENCE.match(reference):
        raise UserError(f"cannot fetch {what[:200]!r}", "it is not [REGISTRY/]NAME[:TAG|@DIGEST]")
    for tool, package in (("bwrap", "bubblewrap"), ("skopeo", "skopeo")):
        if shutil.which(tool) is None:
            raise UserError(f"cannot fetch {what}", f"{tool} is missing", f"install the package {package}")
    return what


def reason(said: IO[bytes], otherwise: str) -> str:
    """The message in the last line of skopeo's log, or ``otherwise`` if it is empty."""
    said.seek(0)
    lines = said.read(20000).decode("utf-8", "replace").strip().splitlines()
    line = lines[-1] if lines else otherwise
    found = re.search(r'msg="((?:[^"\\]|\\.)*)"', line)
    text = found[1].replace('\\"', '"') if found else line
    # skopeo inspect puts this before every error of a registry
    return one_line(re.sub(r'^Error parsing image name "[^"]*": ', "", text)[:400])


def _watch(
    run: subprocess.Popen[bytes],
    what: str,
    folder: Path,
    max_bytes: int,
    until: float,
    progress: Callable[[int], None],
) -> None:
    ended = False
    while not ended:
        ended = run.poll() is not None
        time.sleep(0 if ended else POLL_S)
        now = time.monotonic()
        size, count = _size(folder)
        if size > max_bytes:
            raise UserError(f"cannot fetch {what}", f"it has more than {max_bytes >> 20} MiB")
        if count > FILES_MAX:
            raise UserError(f"cannot fetch {what}", f"it has more than {FILES_MAX} files")
        if now > until and not ended:
            raise UserError(
                f"cannot fetch {what}", "it took too long", "images.import_timeout_s is the limit"
            )
        progress(size)


def _size(folder: Path) -> tuple[int, int]:
    """Bytes and number of all files below a folder; files may vanish or get other names meanwhile."""
    sizes: dict[int, int] = {}  # by inode: skopeo renames what is complete, perhaps into a folder further on
    for above, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                about = Path(above, name).lstat()
                sizes[about.st_ino] = about.st_size
    return sum(sizes.values()), len(sizes)


def skopeo(
    seccomp: int,
    folder: Path,
    max_bytes: int,
    command: str,
    *arguments: str,
    shown: Mapping[str, Path] | None = None,
    options: tuple[str, ...] = (),
) -> list[str]:
    """A command of skopeo in its sandbox.

    Args:
        seccomp: from ``call_filter``; the process needs this descriptor.
        folder: is ``/out``.
        max_bytes: of each file that it writes.
        command: of skopeo.
        arguments: of the command.
        shown: path below ``/out`` -> a file that is there, to be read only.
        options: of skopeo, before the command.
    """
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
    argv += ["--bind", str(folder), "/out"]
    for place, file in (shown or {}).items():
        argv += ["--ro-bind", str(file), f"/out/{place}"]
    argv += ["--seccomp", str(seccomp), "--", "prlimit", "--core=0", f"--fsize={max_bytes}"]
    argv += [f"--data={MEMORY_MAX}", f"--nofile={OPEN_MAX}", "skopeo", *options, "--tmpdir", "/out"]
    argv += ["--override-os", "linux", command]
    argv += ["--authfile", "/auth.json"] if authorization is not None else []
    return [*argv, *arguments]


def _authorization() -> Path | None:
    """The user's credentials, where containers-auth.json(5) says that they are."""
    named = os.environ.get("REGISTRY_AUTH_FILE")
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    docker = os.environ.get("DOCKER_CONFIG") or str(Path.home() / ".docker")
    places = [named] if named else [f"{runtime}/containers/auth.json", f"{docker}/config.json"]
    return next((Path(place) for place in places if Path(place).is_file()), None)
