# SPDX-License-Identifier: Apache-2.0
"""What a site permits: rules by partition, account, QOS and user, and signatures of images.

``rules`` decides and touches no file; ``signatures`` asks ssh-keygen(1) who has signed;
``check`` puts both together. vhpcd asks before it makes a lease, and nodes ask which
folders guests see. Knows neither leases nor nodes.
"""

from __future__ import annotations

from vhpc_slurm.policy.check import check, check_image
from vhpc_slurm.policy.rules import Subject, applying, visible_shares

__all__ = ["Subject", "applying", "check", "check_image", "visible_shares"]
