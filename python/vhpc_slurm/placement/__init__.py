# SPDX-License-Identifier: Apache-2.0
"""Maps the resources that Slurm allocated to guests: pure functions, no search, no input or output."""
