# SPDX-License-Identifier: Apache-2.0
"""The `vhpc` command: what operators and users look at."""
