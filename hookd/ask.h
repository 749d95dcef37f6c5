/* SPDX-License-Identifier: Apache-2.0 */
/* Asks a process that has the Python of hooks in memory to run a hook. */
#ifndef VHPC_HOOKD_ASK_H
#define VHPC_HOOKD_ASK_H

enum {
    /* it did not begin the hook */
    ASK_NOT_RUN = -1,
    /* it began the hook, which was killed */
    ASK_KILLED = -2,
    /* the hook runs for longer than it may */
    ASK_TOO_LONG = -3,
    /* for hooks that somebody else limits */
    ASK_NO_LIMIT = -1,
};

/*
 * Have the process that listens at the path run a hook with this process's environment, stdout and
 * stderr, for at most so many milliseconds.
 * Returns its exit status, 0 to 255, or one of the values above.
 */
int ask_hookd(const char *path, const char *word, char *const *environment, int limit_ms);

#endif
