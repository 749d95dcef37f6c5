# SPDX-License-Identifier: Apache-2.0
"""A lab of many nodes without guests: started for one benchmark, with an image and a stand-in for guests."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from site_catalog import publish

from vhpcbench.common import CHECKOUT, VLAB, BenchError, Lab

STATE = "/run/vhpc-bench-cluster"
IMAGE = "light"
_BUILD = CHECKOUT / "build/lab/programs"
_DOWN = 3
# of the manifest: what every node has
_SMALL: dict[str, Any] = {"min_memory_mib": 64, "min_cpus": 1, "drivers": {"virtio_blk": ""}}


@contextmanager
def light_lab(nodes: int, *, keep: bool) -> Iterator[Lab]:
    """The lab of VLAB_STATE, or one of its own; a lab that did not run before is ended unless ``keep``.

    Raises:
        BenchError: it does not start, or the running one has guests.
    """
    os.environ.setdefault("VLAB_STATE", STATE)
    ran = subprocess.run([VLAB, "status"], stdout=subprocess.DEVNULL, check=False).returncode != _DOWN
    try:
        if subprocess.run([VLAB, "up", "--light", "--nodes", str(nodes)], check=False).returncode:
            raise BenchError("the lab has not started, see above")
        lab = Lab()
        install(lab, IMAGE)
        yield lab
    finally:
        if not (keep or ran):
            subprocess.run([VLAB, "down"], check=False)


def install(lab: Lab, image: str, **keys: Any) -> None:
    """Publish an image whose files are a few bytes, and put the stand-in for guests on all nodes.

    ``keys`` are further keys of the image's manifest.
    """
    publish(lab.paths["shared"] / "vhpc/catalog", image, b"root", **{**_SMALL, **keys})
    build = ["cmake", "--build", str(_BUILD), "--target", "vhpc-agent"]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    found = [path for path in _BUILD.rglob("vhpc-agent") if path.is_file()]
    if done.returncode or not found:
        raise BenchError(f"vhpc-agent cannot be built: {done.stdout[-500:]}")
    folder = lab.paths["shared"] / "light"
    folder.mkdir(exist_ok=True)
    new = folder / ".vhpc-agent.new"
    shutil.copyfile(found[0], new)
    new.chmod(0o755)
    new.replace(folder / "vhpc-agent")  # an agent of an interrupted run may still execute the old file
    stand_in = Path(__file__).with_name("light_libvirt.py").read_bytes()
    for node in lab.nodes:
        for packages in Path(f"/proc/{lab.init(node)}/root/opt/vhpc/lib").glob("python3*/site-packages"):
            (packages / "libvirt.py").write_bytes(stand_in)
