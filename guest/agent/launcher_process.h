/* SPDX-License-Identifier: Apache-2.0 */
/* The process of an MPI launcher that has called the srun of this guest. */
#ifndef VHPC_LAUNCHER_PROCESS_H
#define VHPC_LAUNCHER_PROCESS_H

#include <stdbool.h>
#include <sys/types.h>

enum { LAUNCHER_NAME_MAX = 16 }; /* bytes of a process's name, with the final NUL */

/* Whether a process is a launcher; its name is in name, "" if there is no such process. */
bool launcher_is(pid_t pid, char name[LAUNCHER_NAME_MAX]);
/* The launcher that has called this process, directly or by a shell; 0: none has. */
pid_t launcher_find(char name[LAUNCHER_NAME_MAX]);
/* A descriptor of a process's stderr, or -1. */
int launcher_stderr(pid_t pid);
/* Whether a word is an argument of a process, or a part of one between slashes and commas. */
bool launcher_has_word(pid_t pid, const char *word);
/* Let a process exit with this code now; kill it if that is not possible. */
void launcher_exit(pid_t pid, int code);

#endif
