# SPDX-License-Identifier: Apache-2.0
"""Booting the guests of a plan: reserve, spec, start, set up, diagnose; ``sequence`` has the order.

Decides: in which order a boot takes things, what is announced in the journal before each of them, and
whose fault it is when a guest does not come up.
May not: release anything (the journal's releases do), ask vhpcd or Slurm.  Prolog calls it; ``vhpc plan``
uses ``spec``.
"""
