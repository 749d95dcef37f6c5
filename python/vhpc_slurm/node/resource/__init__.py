# SPDX-License-Identifier: Apache-2.0
"""The resources that a generation holds on a node: a file and a class for each kind.

Decides: what the journal has of a kind, how a resource is taken (announced first), released and verified,
and how one without a journal is found and removed.  ``registry`` has all kinds and their order.
May not: decide when a job ends, know a lease's state, or ask vhpcd or Slurm.  ``node.boot`` takes resources,
``node.teardown`` releases them, ``reconcile`` looks for orphans.
"""
