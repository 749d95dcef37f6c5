/* SPDX-License-Identifier: Apache-2.0 */
/* The program: standard input and output are the host. */
#include "forward.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "frame.h"

enum {
    READ_MAX = 65536,
    UNREAD_MAX = 1 << 22,
    EXIT_USAGE = 2,
    EXIT_NO_PROGRAM = 127,
    TCP_STATE_LISTEN = 0x0a
};

static const char usage[] = "usage: vhpc-agent --forward PORT [--task N]\n"
                            "       vhpc-agent --forward-to PROGRAM [ARG...]\n";

int forward_dial(const struct forward *f, unsigned try)
{
    struct sockaddr_in v4 = {.sin_family = AF_INET,
                             .sin_port = htons(f->port),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct sockaddr_in6 v6 = {
        .sin6_family = AF_INET6, .sin6_port = htons(f->port), .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    const void *to = try == 0 ? (const void *)&v4 : (const void *)&v6;
    int one = 1, fd;
    if (try > 1)
        return -ENOENT;
    fd = socket(try == 0 ? AF_INET : AF_INET6, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    /* A guest without IPv6: keep the error of the first address. */
    if (fd < 0)
        return try == 0 ? -errno : -ECONNREFUSED;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (connect(fd, to, try == 0 ? sizeof v4 : sizeof v6) < 0 && errno != EINPROGRESS) {
        int rc = try == 0 ? -errno : -ECONNREFUSED;
        (void)close(fd);
        return rc;
    }
    return fd;
}

_Noreturn static void become(char **program, int connection)
{
    /* Of this program, and of a shell that has started it in the background. */
    for (int number = 1; number < NSIG; number++)
        (void)signal(number, SIG_DFL);
    if (dup2(connection, STDIN_FILENO) >= 0 && dup2(connection, STDOUT_FILENO) >= 0)
        (void)execv(program[0], program);
    (void)fprintf(stderr, "vhpc-agent: cannot start %s: %s\n", program[0], strerror(errno));
    _exit(EXIT_NO_PROGRAM);
}

int forward_start(const struct forward *f, unsigned try)
{
    int ends[2];
    if (try > 0)
        return -ENOENT;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0)
        return -errno;
    pid_t child = fork();
    int rc = child < 0 ? -errno : ends[0];
    if (child == 0)
        become(f->program, ends[1]);
    (void)close(ends[1]);
    if (rc < 0)
        (void)close(ends[0]);
    return rc;
}

bool forward_listens(const char *path, uint16_t port)
{
    char line[512];
    bool found = false;
    FILE *table = fopen(path, "re");
    if (table == NULL)
        return false;
    while (!found && fgets(line, sizeof line, table) != NULL) {
        char local[5] = "", state[3] = "";
        if (sscanf(line, " %*[0-9]: %*[0-9A-Fa-f]:%4s %*[0-9A-Fa-f]:%*4s %2s", local, state) == 2)
            found =
                strtoul(local, NULL, 16) == port && strtoul(state, NULL, 16) == TCP_STATE_LISTEN;
    }
    (void)fclose(table);
    return found;
}

static void end(struct forward *f, const char *why)
{
    if (!f->ended)
        f->why = why;
    f->ended = true;
}

/* An honest host never has so much of ours unread, so waiting for it cannot be a deadlock. */
static short want_input(struct source *s)
{
    const struct forward *f = s->owner;
    return f->out.len < UNREAD_MAX ? POLLIN : 0;
}

static void input_ready(struct source *s, short revents)
{
    static uint8_t data[READ_MAX];
    struct forward *f = s->owner;
    (void)revents;
    ssize_t n = read(s->fd, data, sizeof data);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n <= 0) {
        end(f, NULL);
        return;
    }
    int rc = forward_feed(f, data, (size_t)n);
    if (rc < 0)
        end(f, rc == -EPROTO ? f->why : strerror(-rc));
}

static short want_output(struct source *s)
{
    const struct forward *f = s->owner;
    return f->out.len > 0 ? POLLOUT : 0;
}

static void output_ready(struct source *s, short revents)
{
    struct forward *f = s->owner;
    (void)revents;
    ssize_t n = write(s->fd, buf_head(&f->out), f->out.len);
    if (n < 0 && errno != EAGAIN && errno != EINTR)
        end(f, NULL);
    if (n > 0)
        buf_consume(&f->out, (size_t)n);
}

static int say_hello(struct forward *f)
{
    uint8_t raw[FORWARD_FRAME_MAX], hello[4];
    bool listens = f->program != NULL || forward_listens("/proc/net/tcp", f->port) ||
                   forward_listens("/proc/net/tcp6", f->port);
    put_le16(hello, FORWARD_VERSION);
    put_le16(hello + 2, listens ? 1 : 0);
    struct forward_frame frame = {.type = FORWARD_HELLO, .length = sizeof hello, .payload = hello};
    return buf_append(&f->out, raw, forward_pack(raw, &frame));
}

static int serve(struct forward *f)
{
    f->input =
        (struct source){.fd = STDIN_FILENO, .want = want_input, .ready = input_ready, .owner = f};
    f->output = (struct source){
        .fd = STDOUT_FILENO, .want = want_output, .ready = output_ready, .owner = f};
    (void)signal(SIGPIPE, SIG_IGN);
    /* A host that reads slowly must not stop the reading of what it sends. */
    (void)fcntl(STDOUT_FILENO, F_SETFL, fcntl(STDOUT_FILENO, F_GETFL) | O_NONBLOCK);
    int rc = loop_add(&f->loop, &f->input);
    rc = rc < 0 ? rc : loop_add(&f->loop, &f->output);
    rc = rc < 0 ? rc : say_hello(f);
    while (rc == 0 && !f->ended)
        rc = loop_once(&f->loop, -1);
    const char *why = rc < 0 ? strerror(-rc) : f->why;
    if (why != NULL)
        (void)fprintf(stderr, "vhpc-agent: forward: %s\n", why);
    forward_free(f);
    return why != NULL;
}

static bool number(const char *text, unsigned long max, unsigned long *out)
{
    char *rest;
    errno = 0;
    *out = strtoul(text, &rest, 10);
    return errno == 0 && text[0] >= '0' && text[0] <= '9' && *rest == '\0' && *out <= max;
}

/* A step has one task for each guest of a node; all but one end at once. */
static bool is_other_task(unsigned long wanted)
{
    const char *text = getenv("SLURM_PROCID");
    unsigned long own = 0;
    return text != NULL && number(text, UINT32_MAX, &own) && own != wanted;
}

int forward_main(int argc, char **argv)
{
    static struct forward forward = {.dial = forward_dial};
    unsigned long port = 0, task = 0;
    if ((argc != 2 && argc != 4) || !number(argv[1], UINT16_MAX, &port) || port == 0 ||
        (argc == 4 && (strcmp(argv[2], "--task") != 0 || !number(argv[3], UINT32_MAX, &task)))) {
        (void)fputs(usage, stderr);
        return EXIT_USAGE;
    }
    if (is_other_task(task))
        return 0;
    forward.port = (uint16_t)port;
    return serve(&forward);
}

int forward_to_main(int argc, char **argv)
{
    static struct forward forward = {.dial = forward_start};
    if (argc < 2) {
        (void)fputs(usage, stderr);
        return EXIT_USAGE;
    }
    forward.program = argv + 1;
    (void)signal(SIGCHLD, SIG_IGN); /* the kernel reaps programs */
    return serve(&forward);
}
