# SPDX-License-Identifier: Apache-2.0
"""A light lab (`lab/vlab up --light`): which it is, and what a campaign needs there."""

from __future__ import annotations

from cluster import IMAGE, vlab_status


def is_light() -> bool:
    """Whether the lab that is up has no libvirtd on its nodes; False without a lab."""
    hosts = vlab_status()["hosts"]
    return "n1" in hosts and "libvirtd" not in hosts["n1"]["units"]


def prepare() -> None:
    """Publish an image of the name that jobs use, and put the stand-in for guests on all nodes."""
    from vhpcbench.common import Lab
    from vhpcbench.lightlab import install

    nothing = {"arguments": [], "entrypoint": [], "environment": {}, "user": "", "working_dir": ""}
    # the memory is that of the real image, which a message to the user names
    install(Lab(), IMAGE, min_memory_mib=192, process=nothing)
