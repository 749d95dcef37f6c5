/* SPDX-License-Identifier: Apache-2.0 */
/* The directory of a guest at which its disk is mounted. */
#ifndef VHPC_SPANK_MOUNTPOINT_H
#define VHPC_SPANK_MOUNTPOINT_H

#include <stdbool.h>

/*
 * True if a disk may be mounted there: an absolute path in its shortest form, of plain characters,
 * outside of the guest's own system and of homes.  On false, why says what is expected.
 * vhpc_slurm.config.disks has the same rules (tests/unit/rules/test_shared_constants.py).
 */
bool vhpc_mount_point_check(const char *path, const char **why);

#endif
