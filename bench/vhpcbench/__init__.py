# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of vhpc: each compares with a reference that is run in the same command."""
