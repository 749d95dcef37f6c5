# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on a node: guests are held, their state is written to sealed files, and restored from these."""
