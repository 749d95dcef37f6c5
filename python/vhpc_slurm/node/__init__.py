# SPDX-License-Identifier: Apache-2.0
"""On a compute node: everything that a NodePlan becomes, and how it is taken apart again.

From the bottom: ``host`` (the node without jobs), ``store`` (files), ``devices`` (PCI devices of a job),
``network`` and ``guest`` (a running guest), ``resource`` (what a generation holds: taking, releasing and
finding it).  Above them: ``boot`` and ``teardown``.  Nothing here knows the controller; hooks carry a
Lease from one to the other.
"""
