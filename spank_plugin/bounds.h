/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Limits that the plugin shares with the hooks, which are Python: a value that the plugin accepts
 * must be one that the hooks accept.  tests/unit/test_shared_constants.py compares the two.
 */
#ifndef VHPC_SPANK_BOUNDS_H
#define VHPC_SPANK_BOUNDS_H

/* Longest canonical value, with its NUL: the console path. */
#define VHPC_VALUE_SIZE 1025

enum {
    VHPC_TIMEOUT_MAX_S = 3600,  /* --vhpc-timeout; also the limit of the site's boot_timeout_s */
    VHPC_VFS_MAX = 256,         /* virtual functions on a node: what GUIDs tell apart on a rail */
    VHPC_GUESTS_MAX = 64,       /* guests on a node */
    VHPC_DISK_MIN_MIB = 64,     /* --vhpc-disk; its maximum is SIZE_MAX_MIB of options.c */
    VHPC_MOUNT_POINT_MAX = 255, /* bytes of the mount point of --vhpc-disk */
    VHPC_IMAGE_PART_MAX = 64,   /* bytes of the name, and of the tag, of an image */
    VHPC_DIGEST_DIGITS = 64,    /* of an image: sha256 in hexadecimal */
};

#endif
