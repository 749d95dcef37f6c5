# SPDX-License-Identifier: Apache-2.0
"""Usage of GPUs in a guest: an image with a GPU of NVIDIA in its sysfs, and with the stand-in for NVML."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Lab
from variants import PRELUDE

pytestmark = pytest.mark.lab

STANDIN = Path(__file__).parents[1] / "guest/nvml_standin.c"
RECIPE = """
sudo cp libnvidia-ml.so.1 /usr/lib/$(uname -m)-linux-gnu/
sudo mkdir -p /opt/sys/bus/pci/devices/0000:05:00.0
cd /opt/sys/bus/pci/devices/0000:05:00.0
echo 0x030200 | sudo tee class; echo 0x10de | sudo tee vendor
"""
PUBLISH = PRELUDE.replace("/shared/vhpc/catalog", "/scratch/alice/images") + (
    "base = load('gpu')\npublish('gpu', base | {'cmdline': base['cmdline'] + ' vhpc.agent.sysfs=/opt/sys'})\n"
)


@pytest.fixture
def image(lab: Lab, tmp_path: Path) -> Iterator[str]:
    """An image of alice's."""
    library = tmp_path / "libnvidia-ml.so.1"
    build = ["cc", "-std=c17", "-O2", "-shared", "-fPIC", "-o", str(library), str(STANDIN)]
    subprocess.run(build, check=True, timeout=60)
    text = base64.b64encode(library.read_bytes()).decode()
    lab.run("login", "sh", "-c", "base64 -d > libnvidia-ml.so.1", user="alice", stdin=text)
    job = lab.finish(RECIPE, "-w", "n1", "--vhpc-save=own/gpu")
    assert job.show()["JobState"] == "COMPLETED", job.output()
    lab.run("login", "python3", "-", user="alice", stdin=PUBLISH)
    yield "own/gpu"
    lab.run("login", "rm", "-rf", "/scratch/alice", "/home/alice/libnvidia-ml.so.1")
    lab.run("n1", "rm", "-rf", "/var/lib/vhpc/images/own/2001")


@pytest.mark.promise("usage.gpus")
def test_a_job_has_the_use_of_its_gpus_in_seff_and_report(lab: Lab, image: str) -> None:
    """NVML's process has no privileges; its first answer is that the driver is not loaded yet."""
    script = "sleep 35; ps -o user=,comm= -C vhpc-nvml; grep NoNewPrivs /proc/$(pidof vhpc-nvml)/status"
    job = lab.finish(script, "-w", "n1", "-t", "5", image=image)
    assert job.output().split() == ["nobody", "vhpc-nvml", "NoNewPrivs:", "1"]
    expected = [
        "GPU 0000:05:00.0: 75.0% busy, peak memory 3.0 GiB, 250.5 W (guest 0 on n1)",
        "GPU 0000:af:00.0: peak memory 3.0 GiB (guest 0 on n1)",
    ]
    for verb in ("seff", "report"):
        said = lab.run("login", "vhpc", verb, str(job.id), user="alice").out.splitlines()
        assert [line.strip() for line in said if "GPU 0000" in line] == expected, verb
    gpus = json.loads(lab.run("login", "vhpc", "seff", str(job.id), "--json", user="alice").out)["gpus"]
    assert [(one["busy_e4"], one["power_mw"]) for one in gpus] == [(7500, 250500), (None, None)]
    comment = lab.run("ctl", "sacct", "-nXP", "-o", "AdminComment", "-j", str(job.id)).out
    assert "gpu_busy_percent=75.0 gpu_peak_bytes=3221225472" in comment
