# SPDX-License-Identifier: Apache-2.0
"""The `vhpc` command for operators and users."""
