# SPDX-License-Identifier: Apache-2.0
"""A whole Slurm cluster on one machine, made of namespaces and overlays."""
