# SPDX-License-Identifier: Apache-2.0
"""vhpc fabric: partition keys, and the partitions file of OpenSM."""

from vhpc_slurm.cli.verbs import Group, Verb

GROUP = Group(
    Verb(
        "ls",
        "fabric.keys:ls",
        "List the partition keys that are not free, with job and state (root, on vhpcd's host).",
    ),
    Verb(
        "show",
        "fabric.keys:show",
        "Show which job has a key: lease, nodes and their last report, ports (root, on vhpcd's host).",
    ),
    Verb(
        "fence",
        "fabric.keys:fence",
        "Declare that a node is OFF, so that keys of ended jobs need not wait for it (root or SlurmUser).",
    ),
    Verb(
        "clear",
        "fabric.keys:clear",
        "Remove a key's tombstone if no port of the fabric has that key (root, on vhpcd's host).",
    ),
    Verb(
        "audit",
        "fabric.keys:audit",
        "Compare partitions file and port tables with the keys in use; exit 1 if anything differs (root).",
    ),
    Verb(
        "render",
        "fabric.partitions:render",
        "Print the partitions file for the keys in use (root, on vhpcd's host).",
    ),
    Verb(
        "manager",
        "fabric.manager:manager",
        "Serve this host's OpenSM to a vhpcd on another host: lines of JSON on stdin and stdout.",
    ),
    Verb(
        "lint",
        "fabric.partitions:lint",
        "Check a partitions file for lines that OpenSM rejects or misreads; exit 1 if there is one.",
    ),
)
