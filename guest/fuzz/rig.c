/* SPDX-License-Identifier: Apache-2.0 */
#include "rig.h"

#include <errno.h>
#include <sys/socket.h>
#include <unistd.h>

void rig_drain(int fd)
{
    static uint8_t sink[65536];
    while (recv(fd, sink, sizeof sink, MSG_DONTWAIT) > 0)
        ;
}

void rig_feed(struct loop *loop, int fd, const uint8_t *data, size_t size)
{
    while (size > 0) {
        ssize_t n = send(fd, data, size < 4096 ? size : 4096, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0 && errno != EAGAIN)
            return;
        if (n > 0) {
            data += n;
            size -= (size_t)n;
        }
        (void)loop_once(loop, 0);
        rig_drain(fd);
    }
    for (int i = 0; i < 3; i++)
        (void)loop_once(loop, 0);
    rig_drain(fd);
}
