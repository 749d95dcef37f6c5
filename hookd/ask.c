/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One hook, one connection.  To vhpc-hookd: the length of the rest, as 4 bytes in the order of the
 * host; then the hook's word and the environment, each text with its final zero.  From vhpc-hookd:
 * 'R' when it is ready.  To vhpc-hookd: 'S' with stdout and stderr as SCM_RIGHTS.  From vhpc-hookd:
 * 'B' when the hook begins, and its exit status as one byte when it has ended.
 *
 * The descriptors go last, because Slurm waits until no process has the hook's stdout: a stopped
 * vhpc-hookd would hold it.  A connection that ends after 'B' means that the hook was killed.
 * vhpc-hookd ends a hook whose connection is closed, so a hook that Slurm kills does not continue.
 * Compute nodes have another process with the same protocol.
 */
#include "ask.h"

#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum {
    /* a stopped or overloaded vhpc-hookd costs this much, then the hook runs without it */
    START_MS = 10 * 1000,
    /* the kernel accepts larger environments, Slurm does not make them */
    LONGEST = 8 * 1024 * 1024,
};

/* a deadline that never passes */
static const int64_t never = INT64_MAX;

static int64_t now_ms(void)
{
    struct timespec now;

    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Wait until the socket is ready; false when the deadline passes first. */
static bool wait_for(int fd, short events, int64_t deadline)
{
    struct pollfd one = {.fd = fd, .events = events};

    for (;;) {
        int64_t left = deadline == never ? -1 : deadline - now_ms();
        int ready;

        if (left <= 0 && deadline != never)
            return false;
        ready = poll(&one, 1, (int)left);
        if (ready > 0)
            return true;
        if (ready < 0 && errno != EINTR)
            return false;
    }
}

/* Connect to a process of root or of this user: no other user may get a job's environment. */
static int connect_to(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct ucred peer;
    socklen_t size = sizeof(peer);
    int fd;

    if (strlen(path) >= sizeof(address.sun_path))
        return -1;
    memcpy(address.sun_path, path, strlen(path) + 1);
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -1;
    if (connect(fd, (struct sockaddr *)&address, sizeof(address)) != 0 ||
        getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 ||
        (peer.uid != 0 && peer.uid != geteuid())) {
        (void)close(fd);
        return -1;
    }
    return fd;
}

/* Length, word and environment; the caller frees it. */
static char *pack(const char *word, char *const *environment, size_t *length)
{
    size_t size = strlen(word) + 1;
    uint32_t head;
    char *body;
    char *end;

    for (char *const *one = environment; *one != NULL; one++)
        size += strlen(*one) + 1;
    if (size > LONGEST)
        return NULL;
    body = malloc(sizeof(head) + size);
    if (body == NULL)
        return NULL;
    head = (uint32_t)size;
    memcpy(body, &head, sizeof(head));
    end = stpcpy(body + sizeof(head), word) + 1;
    for (char *const *one = environment; *one != NULL; one++)
        end = stpcpy(end, *one) + 1;
    *length = sizeof(head) + size;
    return body;
}

static bool send_start(int fd)
{
    char start = 'S';
    int streams[2] = {STDOUT_FILENO, STDERR_FILENO};
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(streams))];
    } control = {0};
    struct iovec part = {.iov_base = &start, .iov_len = 1};
    struct msghdr message = {
        .msg_iov = &part,
        .msg_iovlen = 1,
        .msg_control = control.space,
        .msg_controllen = sizeof(control.space),
    };

    control.header.cmsg_level = SOL_SOCKET;
    control.header.cmsg_type = SCM_RIGHTS;
    control.header.cmsg_len = CMSG_LEN(sizeof(streams));
    memcpy(CMSG_DATA(&control.header), streams, sizeof(streams));
    return sendmsg(fd, &message, MSG_NOSIGNAL) == 1;
}

static bool send_body(int fd, const char *body, size_t length, int64_t deadline)
{
    while (length > 0) {
        ssize_t sent = send(fd, body, length, MSG_NOSIGNAL);

        if (sent > 0) {
            body += sent;
            length -= (size_t)sent;
        } else if (errno != EINTR && (errno != EAGAIN || !wait_for(fd, POLLOUT, deadline))) {
            return false;
        }
    }
    return true;
}

/* One byte from vhpc-hookd; ASK_NOT_RUN when it ends, ASK_TOO_LONG at the deadline. */
static int receive(int fd, int64_t deadline)
{
    unsigned char byte;

    for (;;) {
        ssize_t got;

        if (!wait_for(fd, POLLIN, deadline))
            return ASK_TOO_LONG;
        got = recv(fd, &byte, 1, 0);
        if (got == 1)
            return byte;
        if (got == 0 || (errno != EINTR && errno != EAGAIN))
            return ASK_NOT_RUN;
    }
}

int ask_hookd(const char *path, const char *word, char *const *environment, int limit_ms)
{
    int64_t deadline = now_ms() + START_MS;
    int status = ASK_NOT_RUN;
    size_t length = 0;
    char *body;
    int fd = connect_to(path);

    if (fd < 0)
        return ASK_NOT_RUN;
    body = pack(word, environment, &length);
    if (body != NULL && send_body(fd, body, length, deadline) && receive(fd, deadline) == 'R' &&
        send_start(fd) && receive(fd, deadline) == 'B') {
        status = receive(fd, limit_ms == ASK_NO_LIMIT ? never : now_ms() + limit_ms);
        if (status == ASK_NOT_RUN)
            status = ASK_KILLED;
    }
    free(body);
    (void)close(fd);
    return status;
}
