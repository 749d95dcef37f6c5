/* SPDX-License-Identifier: Apache-2.0 */
/* Making directories. */
#ifndef VHPC_DIRECTORY_H
#define VHPC_DIRECTORY_H

#include <sys/types.h>

/*
 * Make a directory and those above it, with this mode. Where a link leads to a path that does not
 * exist, the directories of that path are made: images of ostree have /home as a link to var/home
 * and make that at their first boot. 0 or -errno.
 */
int directory_make(const char *path, mode_t mode);

/* Make a directory that only this user may enter, if it does not exist. 0 or -errno. */
int directory_make_private(const char *path, uid_t uid, gid_t gid);

#endif
