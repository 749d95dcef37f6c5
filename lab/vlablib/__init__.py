# SPDX-License-Identifier: Apache-2.0
"""A complete Slurm cluster on one machine, built from namespaces and overlays."""
