# SPDX-License-Identifier: Apache-2.0
"""vhpc web: what vhpcd knows of jobs, as pages that update themselves; it changes nothing."""
