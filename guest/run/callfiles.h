/* SPDX-License-Identifier: Apache-2.0 */
/* Files of a host call on the host besides its arguments: a copy of a script, a way back. */
#ifndef VHPC_CALLFILES_H
#define VHPC_CALLFILES_H

#include "execspec.h"

struct call_files {
    char folder[32];  /* private, with the script; "" = none */
    const char *name; /* of the script, in spec->script_path */
};

/*
 * Complete the arguments of a command that the guest asks for:
 *  - sbatch gets a copy of the guest's script, under its name, in place of the operand;
 *  - salloc gets this program in place of the operand, so that its command runs in the guest;
 *  - sacctmgr gets --readonly.
 * `socket` is that of the guest. 0 or -errno with one line in why.
 */
int call_files_prepare(struct call_files *files, struct execspec *spec, const char *socket,
                       char *why, size_t size);
/* Remove the copy. */
void call_files_drop(struct call_files *files);

#endif
