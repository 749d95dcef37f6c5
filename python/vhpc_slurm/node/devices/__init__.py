# SPDX-License-Identifier: Apache-2.0
"""PCI devices of a job: checked, bound to vfio-pci, given a network identity, and released clean.

Decides: whether a guest may get a device, and whether it goes into quarantine after a job.
May not: choose a device for a job (``placement``), start a guest.  Uses ``host`` and ``store``.
"""
