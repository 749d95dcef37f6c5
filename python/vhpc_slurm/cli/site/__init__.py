# SPDX-License-Identifier: Apache-2.0
"""Verbs for the whole site: configuration, policy, snapshots of shares, the database of vhpcd."""

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
SHARE = Group(
    Verb(
        "snapshot",
        "site.share:snapshot",
        "Make a snapshot of a shared folder: guests that start from now on have this state of it.",
    ),
    Verb("ls", "site.share:ls", "List the folders of shares.snapshots, and their current snapshots."),
)
DATABASE = Group(
    Verb(
        "copy",
        "site.database:copy",
        "Copy all leases into the empty database of the other engine, and compare all rows.",
    ),
)
