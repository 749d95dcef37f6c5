# SPDX-License-Identifier: Apache-2.0
"""Verbs for the whole site: configuration, policy, the database of vhpcd."""

from vhpc_slurm.cli.verbs import Group, Verb

POLICY = Group(
    Verb(
        "explain",
        "site.policy:explain",
        "Show which rule applies to a job, what it permits, and which values it sets.",
    ),
    Verb(
        "check",
        "site.policy:check",
        "Exit with status 1, and one line, if no rule that may apply permits the job; else print nothing.",
    ),
)
DATABASE = Group(
    Verb(
        "copy",
        "site.database:copy",
        "Copy all leases into the empty database of the other engine, and compare all rows.",
    ),
)
