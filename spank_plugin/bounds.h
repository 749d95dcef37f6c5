/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Limits that the plugin shares with the hooks, which are Python: a value that the plugin accepts
 * must be one that the hooks accept.  tests/unit/rules/test_shared_constants.py compares the two.
 * Limits of an option are in its declaration (options.h).
 */
#ifndef VHPC_SPANK_BOUNDS_H
#define VHPC_SPANK_BOUNDS_H

/* Longest canonical value, with its NUL: the console path, and folders to mount. */
#define VHPC_VALUE_SIZE 1025

enum {
    VHPC_MOUNT_POINT_MAX = 255, /* bytes of a directory of guests on which something is mounted */
    VHPC_MOUNTS_MAX = 16,       /* folders in a value of --vhpc-mount */
    VHPC_CHECKPOINT_MAX = 64,   /* bytes of the name of a checkpoint */
    VHPC_CLUSTER_MAX = 64,      /* bytes of the name of a cluster, and of an account before it */
    VHPC_IMAGE_PART_MAX = 64,   /* bytes of the name, and of the tag, of an image */
    VHPC_DIGEST_DIGITS = 64,    /* of an image: sha256 in hexadecimal */
};

#endif
