/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Images that a user names by where they come from: docker://NAME or KIND:PATH.  The command `vhpc`
 * imports them, with the user's rights, when the job is created.
 */
#ifndef VHPC_SPANK_SOURCE_H
#define VHPC_SPANK_SOURCE_H

#include <stdbool.h>
#include <stddef.h>

#include "bounds.h"

/*
 * Become `command image names`, which prints the names of the images that the user may use here.
 * Returns only if that fails, with one line in why.
 */
void vhpc_source_list(const char *command, char *why, size_t size);

/*
 * Run `command image resolve SOURCE`, which says what it does on stderr, and read the image's name
 * with its digest.  False with one line in why.
 */
bool vhpc_source_resolve(const char *command, const char *source, char image[VHPC_VALUE_SIZE],
                         char *why, size_t size);

#endif
