/* SPDX-License-Identifier: Apache-2.0 */
#include "tty.h"

#include <errno.h>
#include <stdbool.h>
#include <termios.h>

static struct termios saved;
static int saved_fd;
static bool is_raw;

int tty_raw(int fd)
{
    struct termios raw;
    if (tcgetattr(fd, &saved) < 0)
        return -errno;
    raw = saved;
    cfmakeraw(&raw);
    if (tcsetattr(fd, TCSADRAIN, &raw) < 0)
        return -errno;
    saved_fd = fd;
    is_raw = true;
    return 0;
}

void tty_restore(void)
{
    if (!is_raw)
        return;
    is_raw = false;
    (void)tcsetattr(saved_fd, TCSADRAIN, &saved);
}
