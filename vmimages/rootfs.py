# SPDX-License-Identifier: Apache-2.0
"""The base of an image: root file system and kernel from Debian packages, cached by a digest of its inputs.

mmdebstrap installs packages (as root, or in a user namespace), finish.sh runs
in the new root, mkfs.erofs writes the image, and veritysetup its hash tree.  The
result is cached under the recipe's key, so that the next build of the same recipe
takes no time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vhpc_slurm.architecture import AARCH64
from vhpc_slurm.bootfiles import armkernel
from vhpc_slurm.bootfiles.errors import BootFileError
from vhpc_slurm.bootfiles.modules import ModuleTree, initrd_files, load_lists
from vhpc_slurm.bootfiles.verity import append_tree
from vmimages import kernel
from vmimages.errors import BuildError
from vmimages.foreign import is_foreign
from vmimages.host import SEARCH, BuildStep, environment, need, run, say
from vmimages.recipe import FINISH_SCRIPT, Recipe

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
# Lines of mmdebstrap that are shown as progress.
PROGRESS = re.compile(r"I: ((?:downloading|extracting|installing) .*)\.\.\.")


@dataclass(frozen=True)
class Base:
    """A finished base in the cache."""

    folder: Path
    kernel_release: str
    cached: bool
    verity: dict[str, Any]
    """The manifest's key of that name."""
    driver_versions: dict[str, str] = field(default_factory=dict)
    """Versions of the recipe's drivers, where the kernel module states one."""

    @property
    def root(self) -> Path:
        """The root file system, with its hash tree."""
        return self.folder / "root.erofs"

    @property
    def kernel(self) -> Path:
        """The kernel, in the recipe's format."""
        return self.folder / "kernel"

    @property
    def packages(self) -> Path:
        """Text: name, version and architecture of each installed package."""
        return self.folder / "packages"

    @property
    def modules(self) -> Path:
        """Folder of the initrd's ``/modules``: modules, and the lists ``load``, ``disk``, ``verity``."""
        return self.folder / "modules"


def base(recipe: Recipe, cache: Path, *, refresh: bool = False) -> Base:
    """The base of a recipe, from the cache or newly built and cached.

    Args:
        recipe: the recipe.
        cache: cache folder; created if absent.
        refresh: build even if the cache has it (packages may be newer).

    Raises:
        BuildError: a tool is missing or failed, or the suite lacks what the recipe names.
    """
    key = recipe.base_key()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(cache / f"{key}.lock"):
            final = cache / key
            if not refresh and (found := _load(final, cached=True)):
                return found
            _need_tools()
            with _work_folder(cache) as work:
                _build(recipe, work)
                _replace(work / "base", final)
            built = _load(final, cached=False)
    except OSError as err:
        raise BuildError(
            f"cannot use the cache {cache}", str(err), "choose another folder with --cache"
        ) from err
    assert built is not None
    return built


def _load(folder: Path, *, cached: bool) -> Base | None:
    try:
        about = json.loads((folder / "base.json").read_text())
    except FileNotFoundError:
        return None
    return Base(folder, about["kernel_release"], cached, about["verity"], about["driver_versions"])


def _build(recipe: Recipe, work: Path) -> None:
    tree, out = work / "tree", work / "base"
    (out / "modules").mkdir(parents=True)
    if is_foreign(recipe.architecture):
        say(f"this host emulates {recipe.architecture.name}: the build takes about ten times as long")
    system = f"Debian {recipe.debian.suite} for {recipe.architecture.name}"
    with BuildStep(f"installing {system} from {recipe.debian.mirror}"):
        _install(recipe, tree, work / "log")
    with BuildStep(f"writing {recipe.root.format}"):
        _write_root(recipe, tree, out / "root.erofs", work / "log")
        try:
            verity = append_tree(out / "root.erofs")
        except BootFileError as err:
            raise BuildError(err.what, err.why) from err
    own = tree / ".vhpc"
    release = (own / "release").read_text().strip()
    try:
        modules = ModuleTree.read(tree / "usr/lib/modules" / release)
        _check_names(recipe, modules, release)
        for name, data in initrd_files(load_lists(modules, recipe.kernel.modules)).items():
            (out / "modules" / name).write_bytes(data)
        versions = {name: version for name in recipe.image.drivers if (version := modules.version(name))}
        (out / "kernel").write_bytes(_kernel(recipe, (own / "vmlinuz").read_bytes()))
    except BootFileError as err:
        raise BuildError(err.what, err.why) from err
    shutil.copyfile(own / "packages", out / "packages")
    about = {"kernel_release": release, "driver_versions": versions, "verity": verity}
    (out / "base.json").write_text(json.dumps(about))


def _kernel(recipe: Recipe, packed: bytes) -> bytes:
    """The kernel in the format of the manifest; BootFileError if it is for another architecture."""
    if recipe.architecture is AARCH64:
        return armkernel.image(packed)
    return kernel.vmlinux(packed) if recipe.kernel.format == "vmlinux" else packed


def _check_names(recipe: Recipe, modules: ModuleTree, release: str) -> None:
    """BuildError if the kernel lacks a driver or module that the recipe names."""
    for key, what, names in (
        ("image.drivers", "driver", recipe.image.drivers),
        ("kernel.modules", "module", recipe.kernel.modules),
    ):
        for name in names:
            if not modules.has(name):
                raise BuildError(
                    f"kernel {release} has no {what} {name}", hint=f"correct {key} of the recipe"
                )


def _install(recipe: Recipe, tree: Path, log: Path) -> None:
    debian = recipe.debian
    argv = [
        "mmdebstrap",
        f"--mode={_mode()}",
        "--format=directory",
        "--variant=minbase",
        f"--architectures={recipe.architecture.debian}",
        f"--keyring={KEYRING}",
        "--include=" + ",".join(sorted({"kmod", *debian.packages})),
        '--aptopt=Acquire::Languages "none"',
        "--aptopt=Acquire::Retries 3",
        '--aptopt=APT::Install-Recommends "false"',
        *(f"--dpkgopt=path-exclude={path}" for path in debian.exclude_paths),
        *(f"--dpkgopt=path-include={path}" for path in debian.include_paths),
        '--customize-hook=mkdir -p "$1/.vhpc"',
        f"--customize-hook=upload {FINISH_SCRIPT} /.vhpc/finish.sh",
        f'--customize-hook=chroot "$1" sh /.vhpc/finish.sh {recipe.kernel.package}',
        debian.suite,
        str(tree),
        *debian.sources(),
    ]
    run(argv, environment(recipe.root.source_date_epoch), log, relay=PROGRESS)


def _write_root(recipe: Recipe, tree: Path, target: Path, log: Path) -> None:
    """Write the root file system, with the ownership as seen in the namespace that created it."""
    inner = tree / ".vhpc" / "root.erofs"
    argv = ["mkfs.erofs", "--quiet", f"-T{recipe.root.source_date_epoch}", f"-U{recipe.root.uuid}"]
    if recipe.root.compression != "none":
        argv += [f"-z{recipe.root.compression}", "-C65536"]
    # The kernel fills /dev.  mmdebstrap creates nodes there only with privileges, so builds would differ.
    argv += ["--exclude-path=.vhpc", "--exclude-regex=^dev/.+"]
    if not recipe.kernel.modules_in_root:
        argv.append("--exclude-path=usr/lib/modules")
    run([*_namespace(), *argv, str(inner), str(tree)], environment(recipe.root.source_date_epoch), log)
    shutil.copyfile(inner, target)


def _need_tools() -> None:
    """Check all tools before the first long step."""
    need("mmdebstrap", "mkfs.erofs", "veritysetup", "zstd", *(() if os.geteuid() == 0 else ("newuidmap",)))
    if not KEYRING.exists():
        raise BuildError(f"{KEYRING} is missing", hint="apt-get install debian-archive-keyring")


def _mode() -> str:
    return "root" if os.geteuid() == 0 else "unshare"


def _namespace() -> list[str]:
    return [] if os.geteuid() == 0 else ["mmdebstrap", "--unshare-helper"]


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Allow one build per recipe at a time; a second one finds the result of the first."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _work_folder(cache: Path) -> Iterator[Path]:
    """A temporary folder in the cache, removed in every case."""
    work = Path(tempfile.mkdtemp(prefix=".work-", dir=cache))
    try:
        work.chmod(0o755)  # the namespace's root is another user and needs access
        yield work
    finally:
        # rm, not shutil: the namespace's users own the tree, and rm must not enter mounts in it.
        remove = ["rm", "-rf", "--one-file-system", str(work / "tree")]
        # rm may fail to remove the empty top folder, if the user owns it and not the namespace.
        subprocess.run([*_namespace(), *remove], env={"PATH": SEARCH}, check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(work, ignore_errors=True)


def _replace(new: Path, final: Path) -> None:
    """Replace an older folder by a finished one."""
    if final.exists():
        old = new.parent / "old"
        final.rename(old)
    new.rename(final)
