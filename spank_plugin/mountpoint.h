/* SPDX-License-Identifier: Apache-2.0 */
/* Directories of a guest at which disks and folders are mounted. */
#ifndef VHPC_SPANK_MOUNTPOINT_H
#define VHPC_SPANK_MOUNTPOINT_H

#include <stdbool.h>

/*
 * True if something may be mounted there: an absolute path in its shortest form, of plain
 * characters, outside of the guest's own system and of homes.  On false, why says what is expected.
 * vhpc_slurm.options.mountpoint has the same rules (tests/unit/rules/test_shared_options.py).
 */
bool vhpc_mount_point_check(const char *path, const char **why);

/*
 * True if the text is a list of SRC:DST[:ro]; the text is changed.  On false, why says what is
 * expected of a DST, or is unchanged.
 */
bool vhpc_mounts_check(char *text, const char **why);

#endif
