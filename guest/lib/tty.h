/* SPDX-License-Identifier: Apache-2.0 */
/* The terminal on our stdin, which is in raw mode while the guest's pty processes the input. */
#ifndef VHPC_TTY_H
#define VHPC_TTY_H

/* Save the modes and set raw mode; 0 or -errno. */
int tty_raw(int fd);
/* Restore the saved modes; no effect if tty_raw was never called. */
void tty_restore(void);

#endif
