/* SPDX-License-Identifier: Apache-2.0 */
#include "passfd.h"

#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

union control {
    struct cmsghdr align;
    char space[CMSG_SPACE(PASSFD_MAX * sizeof(int))];
};

ssize_t passfd_write(int socket, const void *data, size_t len, const struct passed *fds)
{
    union control control = {0};
    struct iovec part = {.iov_base = (void *)(size_t)data, .iov_len = len};
    size_t size = fds->count * sizeof(int);
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control.space,
                             .msg_controllen = CMSG_SPACE(size)};
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    *head = (struct cmsghdr){
        .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(size)};
    memcpy(CMSG_DATA(head), fds->fd, size);
    return sendmsg(socket, &message, MSG_NOSIGNAL);
}

ssize_t passfd_read(int socket, void *to, size_t len, struct passed *fds)
{
    union control control = {0};
    struct iovec part = {.iov_base = to, .iov_len = len};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control.space,
                             .msg_controllen = sizeof control.space};
    ssize_t n = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    if (n < 0)
        return n;
    for (struct cmsghdr *h = CMSG_FIRSTHDR(&message); h != NULL; h = CMSG_NXTHDR(&message, h)) {
        if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS)
            continue;
        passfd_close(fds);
        fds->count = (h->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        memcpy(fds->fd, CMSG_DATA(h), fds->count * sizeof(int));
    }
    return n;
}

void passfd_close(struct passed *fds)
{
    for (size_t i = 0; i < fds->count; i++)
        (void)close(fds->fd[i]);
    fds->count = 0;
}
