/* SPDX-License-Identifier: Apache-2.0 */
/* The terminal on our own stdin, put in raw mode while the guest's pty does the work. */
#ifndef VHPC_TTY_H
#define VHPC_TTY_H

/* Remember the modes and go raw; 0 or -errno. */
int tty_raw(int fd);
/* Back to what it was; harmless when tty_raw was never called. */
void tty_restore(void);

#endif
