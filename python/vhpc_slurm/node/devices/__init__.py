# SPDX-License-Identifier: Apache-2.0
"""PCI devices of a job: checked, bound to vfio-pci, given a network identity, and taken back clean.

Decides: whether a device may be handed out, and whether it goes into quarantine after a job.
May not: choose a device for a job (``placement``), start a guest.  Stands on ``host`` and ``store``.
"""
