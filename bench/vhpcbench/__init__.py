# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of vhpc: each runs a reference in the same command and compares with it."""
