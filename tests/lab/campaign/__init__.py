# SPDX-License-Identifier: Apache-2.0
"""A campaign of random jobs and faults against the lab; `scripts/campaign --help` tells how to run one."""
