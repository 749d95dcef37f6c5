/* SPDX-License-Identifier: Apache-2.0 */
/* A batch script in the guest, found and read as sbatch does. */
#ifndef VHPC_SCRIPTFILE_H
#define VHPC_SCRIPTFILE_H

#include "execspec.h"

/*
 * The file that sbatch and salloc find by this word: as it is if it begins with '.' or '/',
 * otherwise in `folder` (NULL: the working directory; "": not searched) and then in PATH. NULL if
 * no such file exists.
 */
char *scriptfile_find(const char *word, const char *folder);

/* Read the file into spec->script. 0, or -1 with one line in why. */
int scriptfile_read(const char *path, struct execspec *spec, char *why, size_t size);

#endif
