/* SPDX-License-Identifier: Apache-2.0 */
/* Asks vhpc-hookd to run a hook. */
#ifndef VHPC_HOOKD_ASK_H
#define VHPC_HOOKD_ASK_H

enum {
    /* vhpc-hookd did not run the hook to its end; it may have begun */
    ASK_NOT_RUN = -1,
    /* it runs for longer than any hook */
    ASK_TOO_LONG = -2,
};

/*
 * Have vhpc-hookd run a hook with this process's environment, stdout and stderr.
 * Returns its exit status, 0 to 255, or one of the values above.
 */
int ask_hookd(const char *path, const char *word, char *const *environment);

#endif
