/* SPDX-License-Identifier: Apache-2.0 */
/* Directories of the guest on which something of its node is mounted: checks, and their
 * creation. */
#ifndef VHPC_AGENT_MOUNTPOINT_H
#define VHPC_AGENT_MOUNTPOINT_H

#include <limits.h>
#include <stdbool.h>

/*
 * An absolute path without empty, "." or ".." parts and control characters, outside of the guest's
 * own system.
 */
bool mountpoint_allowed(const char *path);

/*
 * Makes the directory and those above it.  real is its path without symbolic links, which is
 * allowed as well.  0 or -errno.
 */
int mountpoint_make(const char *path, char real[PATH_MAX]);

/* Whether the uppermost mount there is this one. */
bool mountpoint_has(const char *path, const char *type, const char *source);

#endif
