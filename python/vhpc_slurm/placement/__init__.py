# SPDX-License-Identifier: Apache-2.0
"""Pure mapping of what Slurm allocated onto guests: no search, no input or output."""
