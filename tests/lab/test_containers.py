# SPDX-License-Identifier: Apache-2.0
"""Containers without root in guests: podman runs and builds them, and what it builds becomes an image."""

from __future__ import annotations

import pytest
from cluster import Job, Lab, publish

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(900)]

IMAGE = "debian-hpc"
# the container has a few programs of its guest: the lab has no registry
BASE = r"""
set -e
exec 2>&1 </dev/null
mkdir -p /tmp/base/bin && cd /tmp/base
cp /bin/dash bin/sh && cp /bin/cat /bin/chown /bin/ls /bin/stat /bin/touch bin/
for f in bin/*; do ldd $f | grep -o '/[^ ]*'; done | sort -u | while read -r l; do
    mkdir -p ".${l%/*}"
    cp "$l" ".$l"
done
tar cf - . | podman import - base:1
"""
RUN = r"""
podman run --rm --network=none -v "$HOME":/h base:1 sh -c '
    cat /proc/self/uid_map; touch /a; chown 5:6 /a; stat -c "owners %u %g" /a; echo inside >/h/from-podman'
stat -c 'home %U' ~/from-podman
podman info --format 'storage {{.Store.GraphRoot}} {{.Store.GraphDriverName}}'
podman run --rm base:1 sh -c 'echo network'
podman run -d --name left base:1 sh -c 'while :; do cat /dev/null; done'
"""
BUILD = r"""
printf 'FROM base:1\nRUN touch /built\nENV MADE=here\n' >/tmp/Dockerfile
podman build -t made:1 -f /tmp/Dockerfile /tmp/base
podman save -q --format oci-archive -o ~/made.tar made:1
cd
sbatch --parsable --vhpc-image=oci-archive:$HOME/made.tar -w n1 -o made.out --wrap 'ls /built; echo $MADE'
"""


@pytest.fixture(scope="module")
def image() -> str:
    """An image with podman."""
    publish(IMAGE)
    return IMAGE


@pytest.mark.promise("containers.podman")
def test_podman_runs_and_builds_containers_without_root(lab: Lab, image: str) -> None:
    job = lab.finish(BASE + RUN + BUILD, "-w", "n1", "--mem=1600", image=image)
    out = job.output()
    assert "owners 5 6\nhome alice\n" in out, out
    assert "65536" in out
    assert "storage /var/tmp/containers-2001 overlay" in out
    assert "\nnetwork\n" in out
    assert job.accounted() == ["COMPLETED", "0:0"], "a container that was left running ends with its job"
    assert lab.read("alice", "from-podman") == "inside\n"
    made = Job(lab, int(out.split()[-1].partition(";")[0]), "alice")
    made.wait()
    assert made.output("made.out") == "/built\nhere\n", "a guest of the image that podman has built"


@pytest.mark.promise("containers.podman")
def test_containers_are_on_the_disk_of_the_guest(lab: Lab, image: str) -> None:
    more = "podman info --format 'storage {{.Store.GraphRoot}} {{.Store.GraphStatus}}'"
    job = lab.finish(BASE + more, "-w", "n1", "--mem=1200", "--vhpc-disk=300M:/local", image=image)
    assert "storage /local/containers-2001" in job.output()
    assert "Native Overlay Diff:true" in job.output()
