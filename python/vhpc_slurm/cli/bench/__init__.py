# SPDX-License-Identifier: Apache-2.0
"""vhpc bench: the acceptance test."""

from vhpc_slurm.cli.verbs import Group, Verb

GROUP = Group(
    Verb(
        "node",
        "bench.acceptance:node",
        "Compare one node with a guest on it: memory bandwidth, files of home, LAMMPS, HPCC.",
    ),
    Verb(
        "job",
        "bench.acceptance:job",
        "Compare several nodes with guests on them: MPI ping-pong and allreduce, LAMMPS, HPCC, "
        "files of home.",
    ),
)
