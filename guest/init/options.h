/* SPDX-License-Identifier: Apache-2.0 */
/* The vhpc.* parameters of the kernel command line. */
#ifndef VHPC_INIT_OPTIONS_H
#define VHPC_INIT_OPTIONS_H

#include <stddef.h>

#include "verity.h"

#define OPTION_SIZE 256

struct init_options {
    char root[OPTION_SIZE];       /* vhpc.root=, block device of the root file system; no default */
    char rootfstype[OPTION_SIZE]; /* vhpc.rootfstype=, default erofs */
    char init[OPTION_SIZE];       /* vhpc.init=, "agent" (default) or a path in the image */
    char overlay_size[OPTION_SIZE]; /* vhpc.overlay_size=, tmpfs size= of the writable layer,
                                       default 50% */
    char disk[OPTION_SIZE]; /* vhpc.disk=, block device with an ext4 for the writable layer in place
                               of the tmpfs; default none */
    char mounted_disk[OPTION_SIZE]; /* vhpc.agent.disk=, block device with an ext4 that the agent
                                       mounts; default none */
    struct verity verity; /* vhpc.verity=, blocks and root hash of the root; default none */
    unsigned rootwait_s;  /* vhpc.rootwait=, seconds to wait for a block device, default 30 */
};

/*
 * Fills options from a kernel command line (one line, words separated by blanks; of equal
 * parameters the last counts). Returns 0, or -1 with a message in error if a parameter is unknown,
 * too long, malformed or missing.
 */
int options_parse(struct init_options *options, const char *cmdline, char *error,
                  size_t error_size);

#endif
