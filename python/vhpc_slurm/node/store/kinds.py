# SPDX-License-Identifier: Apache-2.0
"""Kinds of journal entries; ``node.resources`` has the release of each."""

from __future__ import annotations

RUN_DIR = "rundir"
RESERVATION = "claim"  # the name in journals of earlier versions
IMAGE = "image"
UID = "uid"
PROCESS = "process"
DOMAIN = "domain"
CGROUP = "cgroup"
MEMORY = "memory"
DISK = "disk"
DEVICE = "device"
NVSWITCH = "nvswitch"
NETWORK = "network"
NAT = "nat"
SITE = "site"
