# SPDX-License-Identifier: Apache-2.0
"""Reconciliation of a node: compare what is on it with what should be, and repair the difference.

Decides which findings there are (``node.finding.Kind``), which repair each one has,
and for which devices in quarantine or failed repairs a node must be drained.
May not start guests, and may not touch what belongs to a running hook or to a
live lease, except for guests on an unsafe fabric and jobs that Slurm has lost.

Callers: ``run.reconcile`` is for the health check (``hooks.healthcheck``) and
``vhpc reconcile``; Prolog calls ``ended_jobs``, Epilog ``drain_policy``.

Modules, each below the next: ``finding`` (the result of a repair);
``left_nodes`` (nodes that left a running job); ``audit`` (stale generations, unacknowledged ones),
``drain_policy``; ``ended_jobs``, ``lost_jobs``, ``fabric_isolation`` (jobs and their guests); ``run``.
"""
