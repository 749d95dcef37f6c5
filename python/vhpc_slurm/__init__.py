# SPDX-License-Identifier: Apache-2.0
"""vhpc: a job's own operating system, inside Slurm."""

__version__ = "0.9.0"  # the only place; build files read this line
