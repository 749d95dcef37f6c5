/* SPDX-License-Identifier: Apache-2.0 */
/* The command vhpc-members: the guests of this guest's cluster, and changes. */
#ifndef VHPC_MEMBERS_H
#define VHPC_MEMBERS_H

#include <stdio.h>

#define MEMBERS_COMMAND "vhpc-members"

/* Print the guests that folder/members lists. The exit status. */
int members_print(const char *folder, FILE *out);
/*
 * Print those, and then each change, until the reader of out is gone. The exit status. out must be
 * an open file.
 */
int members_follow(const char *folder, FILE *out);
int members_main(int argc, char **argv);

#endif
