/* SPDX-License-Identifier: Apache-2.0 */
#ifndef VHPC_ROOTFILES_H
#define VHPC_ROOTFILES_H

/*
 * Run a command in the directory of the guest's root as it is below all mounts: argv is its name
 * and arguments, up to NULL. Returns only if it cannot be run: the exit status, after one line on
 * stderr.
 */
int rootfiles_main(char **argv);

#endif
