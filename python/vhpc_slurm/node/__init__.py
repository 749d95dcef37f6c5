# SPDX-License-Identifier: Apache-2.0
"""On a compute node: everything that a NodePlan becomes, and how it is taken apart again.

Four packages, from the bottom: ``host`` (the node without jobs), ``store`` (files), ``devices`` (PCI
devices of a job), ``guest`` (a running guest).  Above them: the boot, ``resources`` and ``teardown`` (the
way back), ``audit`` (what is left over).  Nothing here knows the controller; hooks carry a Lease from one
to the other.
"""
