/* SPDX-License-Identifier: Apache-2.0 */
/* Options from a file of the user (--vhpc-environment). */
#ifndef VHPC_SPANK_ENVIRONMENT_H
#define VHPC_SPANK_ENVIRONMENT_H

#include <stdbool.h>
#include <stddef.h>

#include "options.h"

/*
 * Run `command environment FILE`, which prints the file's options as a user would write them, one
 * in a line, and read them.  False with one line in why.
 */
bool vhpc_environment_read(const char *command, const char *file, struct vhpc_values *values,
                           char *why, size_t size);

#endif
