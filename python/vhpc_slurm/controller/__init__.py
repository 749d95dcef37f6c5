# SPDX-License-Identifier: Apache-2.0
"""vhpcd: leases of generations, and how hooks ask for them."""
