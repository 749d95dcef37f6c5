# SPDX-License-Identifier: Apache-2.0
"""vhpc: a job's own operating system, inside Slurm."""

__version__ = "0.1.0"
