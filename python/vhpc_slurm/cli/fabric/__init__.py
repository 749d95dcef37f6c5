# SPDX-License-Identifier: Apache-2.0
"""vhpc fabric: partition keys, and the partitions file of OpenSM."""
