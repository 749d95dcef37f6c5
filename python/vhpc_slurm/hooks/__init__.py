# SPDX-License-Identifier: Apache-2.0
"""What Slurm calls: the order of things and nothing else."""
