# SPDX-License-Identifier: Apache-2.0
"""The cached system tree of a suite: the root of every lab host is an overlay over it."""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import subprocess
from pathlib import Path

from vmimages.errors import BuildError
from vmimages.foreign import need_emulation
from vmimages.mirrors import ENVIRONMENT, choose, sources

from vhpc_slurm.architecture import Architecture
from vlablib.recipe import SUITES, Suite
from vlablib.report import LabError, say, step
from vlablib.settings import USERS

_LEFT_OUT = ("doc", "man", "info", "locale")
# a sparse file; machines write to other files
_DISK_SIZE = "6G"
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


def acquire(cache: Path, suite: Suite) -> tuple[Path, int]:
    """Return the tree of `suite` and a descriptor that prevents its removal while open.

    If the recipe has no tree yet, it is bootstrapped.

    Raises:
        LabError: mmdebstrap is missing or failed, or no mirror is known.
    """
    while True:
        tree = _ensure(cache, suite)
        fd = os.open(_lock(tree), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_SH)
        if tree.is_dir():
            return tree, fd
        os.close(fd)  # a vlab with another recipe removed it between the two steps


def _ensure(cache: Path, suite: Suite) -> Path:
    tree = cache / f"{suite.name}-{suite.digest()}"
    if tree.is_dir():
        return tree
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _lock(tree).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not tree.is_dir():  # another vlab may have built it meanwhile
            _bootstrap(tree, suite)
    _prune(cache, suite, tree)
    return tree


def disk(tree: Path) -> Path:
    """Path of the disk that was made from a tree."""
    return tree.with_name(tree.name + ".img")


def _lock(tree: Path) -> Path:
    return tree.with_name(tree.name + ".lock")


def _bootstrap(tree: Path, suite: Suite) -> None:
    partial = tree.with_name(tree.name + ".partial")
    donor = tree.with_name(tree.name + ".virtiofsd")
    for left in (partial, donor):
        remove(left)
    if suite.architecture:
        _need_emulation(suite.architecture)
    environment = dict(os.environ)
    environment["VLAB_PYTHON_PACKAGES"] = " ".join(suite.python)
    environment["VLAB_USERS"] = " ".join(f"{user.name}:{user.uid}" for user in USERS)
    environment["LC_ALL"] = "C.UTF-8"
    environment["INITRD"] = "No"  # the hook creates it after it has configured it
    try:
        with step(f"bootstrapping Debian {suite.name} into {tree} (once; 1-2 minutes)"):
            if suite.virtiofsd_from:
                environment["VLAB_VIRTIOFSD_TREE"] = str(donor)
                # variant extract: virtiofsd and its libraries unpacked, nothing configured
                _mmdebstrap(donor, SUITES[suite.virtiofsd_from], "extract", ("virtiofsd",), environment)
            _mmdebstrap(partial, suite, "minbase", suite.packages, environment)
            if suite.finish:
                _make_disk(partial, disk(tree))
    finally:
        remove(donor)
    partial.rename(tree)


def _need_emulation(architecture: Architecture) -> None:
    try:
        need_emulation(architecture)
    except BuildError as err:
        raise LabError(str(err)) from err


def bare(tree: Path, suite: Suite) -> None:
    """Install a suite's packages without the configuration of a lab host; raises as ``acquire``."""
    _mmdebstrap(tree, suite, "essential", suite.packages, {**os.environ, "LC_ALL": "C.UTF-8", "INITRD": "No"})


def _make_disk(tree: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    command = ["mke2fs", "-q", "-t", "ext4", "-d", str(tree), "-E", "root_owner=0:0", str(target), _DISK_SIZE]
    run(*command)


def run(*command: str) -> str:
    """Run a program of this host, and return its standard output.

    Raises:
        LabError: it failed; contains the end of its standard error.
    """
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    if ended.returncode:
        raise LabError(f"{shlex.join(command)}\nended with {ended.returncode}:\n{ended.stderr[-2000:]}")
    return ended.stdout


def _mmdebstrap(
    target: Path, suite: Suite, variant: str, packages: tuple[str, ...], environment: dict[str, str]
) -> None:
    if shutil.which("mmdebstrap") is None:
        raise LabError("mmdebstrap is not installed; run: apt-get install mmdebstrap")
    # own mount and pid namespaces: nothing stays mounted or running in any case
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command += ["mmdebstrap", "--mode=root", "--format=directory", f"--variant={variant}"]
    command += [f"--include={','.join(packages)}", "--dpkgopt=force-unsafe-io"]
    if suite.architecture:
        command.append(f"--architectures={suite.architecture.debian}")
    command += [f"--dpkgopt=path-exclude=/usr/share/{folder}/*" for folder in _LEFT_OUT]
    # apt's own user cannot read the cache, which only root can read
    command += [f"--aptopt={option}" for option in ('APT::Sandbox::User "root"', *suite.apt_options)]
    if variant == "minbase":
        command.append(f"--customize-hook={suite.customize}")
        command += [f"--customize-hook={hook}" for hook in suite.finish]
    if not _KEYRING.exists():
        raise LabError(f"{_KEYRING} is missing; run: apt-get install debian-archive-keyring")
    release = suite.archive or suite.name
    command += [release, str(target), *_sources(release)]
    log = target.with_name(target.name + ".log")
    with log.open("wb") as output:
        ended = subprocess.run(
            command, check=False, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    if ended.returncode:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-25:])
        raise LabError(f"{shlex.join(command)}\nended with {ended.returncode}; the whole log: {log}\n{tail}")
    log.unlink()


def _sources(release: str) -> list[str]:
    """Lines of sources.list: the mirrors in the environment, otherwise those of this host's APT."""
    archive, security = (os.environ.get(name, "") for name in ENVIRONMENT)
    try:
        return sources(release, choose(release, archive, security))
    except BuildError as err:
        raise LabError(str(err)) from err


def remove(folder: Path) -> None:
    """Remove a tree, if it exists."""
    if folder.exists():
        shutil.rmtree(folder)


def _prune(cache: Path, suite: Suite, current: Path) -> None:
    """Remove complete and partial trees of older recipes of the suite, unless a vlab or a lab uses them."""
    for lock_path in cache.glob(f"{suite.name}-*.lock"):
        tree = lock_path.with_suffix("")
        if tree == current:
            continue
        with lock_path.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            say(f"removing {tree}: its recipe has changed")
            for suffix in ("", ".partial", ".virtiofsd"):
                left = tree.with_name(tree.name + suffix)
                remove(left)
                left.with_name(left.name + ".log").unlink(missing_ok=True)
            disk(tree).unlink(missing_ok=True)
            lock_path.unlink()
