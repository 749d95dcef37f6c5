/* SPDX-License-Identifier: Apache-2.0 */
/*
 * srun and salloc wait on a terminal while guests boot.  `vhpc boot-watch` says meanwhile how far
 * they are; no callback of SPANK is called in that time, and none knows the job before it.
 */
#ifndef VHPC_SPANK_WAITING_H
#define VHPC_SPANK_WAITING_H

#include <stdbool.h>
#include <stddef.h>

#define VHPC_WAITER_SIZE 33 /* 32 hexadecimal digits */

/* Whether somebody waits: program is srun or salloc, fd a terminal, and argv does not ask for
 * quiet. */
bool vhpc_somebody_waits(const char *program, char *const *argv, const char *quiet, int fd);

/*
 * The first arguments of this process, as many as there is room for; NULL at their end. Returns how
 * many, 0 if they cannot be read.
 */
int vhpc_own_arguments(char *text, size_t size, char **argv, size_t count);

/* A random word by which vhpcd finds the job; false if there is none. */
bool vhpc_waiter_word(char word[VHPC_WAITER_SIZE]);

/*
 * Start `command boot-watch WORD PID` for this process, not as its child. A failure is silent: the
 * job does not depend on it.
 */
void vhpc_watch_boot(const char *command, const char *word);

#endif
