# SPDX-License-Identifier: Apache-2.0
"""The programs that Slurm runs: Prolog, Epilog, both hooks of slurmctld, and HealthCheckProgram.

Decide the order of the steps and the answer to Slurm (exit status, drain,
requeue, AdminComment).  May not plan, start or release anything themselves:
``node`` and ``reconcile`` do that.  Called by Slurm only, through the scripts in
``prolog/`` and ``epilog/``; no package imports them.
"""
