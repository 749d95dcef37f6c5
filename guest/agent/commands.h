/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Slurm's commands in a guest: files with their names are this binary, which runs the command on
 * the host.
 */
#ifndef VHPC_COMMANDS_H
#define VHPC_COMMANDS_H

#include <stddef.h>

/* Folders in which programs look for commands, also where PATH is not set. */
#define COMMANDS_PATH "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

/* Make links to a binary in a folder; names that exist stay. 0 or -errno. */
int commands_link(const char *binary, const char *folder, char *const *names, size_t count);
/*
 * Mount a binary over each file in a search path that has one of the names. A file of another
 * program stays, with one line on stderr. The files below are in no way changed.
 */
void commands_cover(const char *binary, const char *path, char *const *names, size_t count);

#endif
