# SPDX-License-Identifier: Apache-2.0
"""Permissions of a site: rules by partition, account, QOS and user, and signatures of images.

``rules`` decides and touches no file, as do ``limits``, ``clusters`` and ``defaults``; ``signatures`` asks
ssh-keygen(1) who has signed; ``check`` puts rules and signatures together. vhpcd asks before
it makes a lease, and nodes ask which folders guests see. Does not know leases and nodes.
"""

from __future__ import annotations

from vhpc_slurm.policy.check import PolicyError, check, check_image
from vhpc_slurm.policy.defaults import with_defaults
from vhpc_slurm.policy.limits import bind_refusal, limit_refusal, mount_refusal, unshared
from vhpc_slurm.policy.quotas import QUOTAS, Quota, quota_refusal
from vhpc_slurm.policy.rules import Subject, applying, possible, shares_under, visible_shares

__all__ = [
    "QUOTAS",
    "PolicyError",
    "Quota",
    "Subject",
    "applying",
    "bind_refusal",
    "check",
    "check_image",
    "limit_refusal",
    "mount_refusal",
    "possible",
    "quota_refusal",
    "shares_under",
    "unshared",
    "visible_shares",
    "with_defaults",
]
