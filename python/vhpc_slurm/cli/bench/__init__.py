# SPDX-License-Identifier: Apache-2.0
"""vhpc bench: the acceptance test."""
