/* SPDX-License-Identifier: Apache-2.0 */
/*
 * PMI is not relayed into guests. An MPI library that finds no server behind the variables that
 * Slurm has set runs its task as a separate program ("rank 0 of 1"), or fails with errors that do
 * not name the cause. Therefore the agent detects the first use of PMI and ends the program with
 * the line that came from the host. It holds the other end of PMI_FD (PMI-1, PMI-2), and listens on
 * the port of the guest's loopback interface that PMIX_SERVER_URI* names (PMIx). A program that
 * does not use PMI is not affected, although Slurm sets the variables for each step if MpiDefault
 * says so.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "agent.h"

#define PMI_FD "PMI_FD"

enum {
    /*
     * The program's end, above the fds that can be relayed: Slurm's own number may be in use here.
     */
    PMI_FD_NUMBER = VHPC_FDS_MAX,
    V6 = 1 << 16, /* flag in a port's number: on ::1 and not on 127.0.0.1 */
};

/* A listening socket for all tasks of a step. */
struct pmi_listener {
    struct pmi_listener *next;
    struct agent *agent;
    struct source source;
    uint32_t number;
    unsigned sessions;
};

static short want_input(struct source *s)
{
    (void)s;
    return POLLIN;
}

/* The tasks of a step have the same line. It is printed once in each guest. */
static void end_session(struct session *s)
{
    struct agent *a = s->agent;
    bool said = a->pmi_said != NULL && strcmp(a->pmi_said, s->spec.pmi_refusal) == 0;
    if (!s->started || s->task.finished || s->task.refusal != NULL)
        return;
    task_refuse(&s->task, said ? "" : s->spec.pmi_refusal);
    if (said || s->task.refusal == NULL)
        return;
    free(a->pmi_said);
    a->pmi_said = strdup(s->spec.pmi_refusal);
}

/* --- PMI_FD -------------------------------------------------------------------- */

static void close_fd(struct pmi_guard *g, struct loop *loop)
{
    if (g->source.fd < 0)
        return;
    loop_remove(loop, &g->source);
    (void)close(g->source.fd);
    g->source.fd = -1;
}

static void fd_ready(struct source *source, short revents)
{
    struct session *s = source->owner;
    char byte;
    (void)revents;
    ssize_t n = read(source->fd, &byte, 1);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    close_fd(&s->pmi, &s->agent->loop);
    if (n > 0) /* otherwise all processes that had the other end have closed it */
        end_session(s);
}

static int guard_fd(struct session *s)
{
    char entry[32];
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0)
        return -errno;
    s->pmi.child = ends[1];
    s->pmi.source =
        (struct source){.fd = ends[0], .want = want_input, .ready = fd_ready, .owner = s};
    int rc = fd_prepare(ends[0]);
    if (rc == 0)
        rc = loop_add(&s->agent->loop, &s->pmi.source);
    execspec_drop_env(&s->spec, PMI_FD "=");
    (void)snprintf(entry, sizeof entry, PMI_FD "=%d", PMI_FD_NUMBER);
    return rc == 0 ? execspec_add_env(&s->spec, entry) : rc;
}

int pmi_place(const struct session *s)
{
    if (s->pmi.child < 0)
        return 0;
    if (s->pmi.child == PMI_FD_NUMBER)
        return fcntl(s->pmi.child, F_SETFD, 0) < 0 ? -errno : 0;
    return dup2(s->pmi.child, PMI_FD_NUMBER) < 0 ? -errno : 0;
}

void pmi_started(struct session *s)
{
    if (s->pmi.child >= 0)
        (void)close(s->pmi.child);
    s->pmi.child = -1;
}

/* --- PMIX_SERVER_URI* ---------------------------------------------------------- */

static void port_ready(struct source *source, short revents)
{
    const struct pmi_listener *p = source->owner;
    (void)revents;
    int fd = accept4(source->fd, NULL, NULL, SOCK_CLOEXEC);
    if (fd < 0)
        return;
    for (struct session *s = p->agent->sessions; s != NULL; s = s->next)
        for (size_t i = 0; i < PMI_PORTS_MAX; i++)
            if (s->pmi.port[i] == p->number)
                end_session(s);
    /*
     * After the processes have ended, so that none takes the end of the connection for an answer.
     */
    (void)close(fd);
}

static int listen_at(uint32_t number)
{
    struct sockaddr_in in = {.sin_family = AF_INET, .sin_port = htons((uint16_t)number)};
    struct sockaddr_in6 in6 = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)number)};
    bool v6 = (number & V6) != 0;
    const struct sockaddr *at = v6 ? (const void *)&in6 : (const void *)&in;
    socklen_t len = v6 ? sizeof in6 : sizeof in;
    int on = 1;
    in.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    in6.sin6_addr = in6addr_loopback;
    int fd = socket(at->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -errno;
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, at, len) == 0 && listen(fd, SOMAXCONN) == 0)
        return fd;
    int rc = -errno;
    (void)close(fd);
    return rc;
}

static struct pmi_listener *listener_find(const struct agent *a, uint32_t number)
{
    struct pmi_listener *p = a->pmi_listeners;
    while (p != NULL && p->number != number)
        p = p->next;
    return p;
}

static int listener_open(struct agent *a, uint32_t number)
{
    struct pmi_listener *p = listener_find(a, number);
    if (p != NULL) {
        p->sessions++;
        return 0;
    }
    int fd = listen_at(number);
    p = fd < 0 ? NULL : calloc(1, sizeof *p);
    if (p == NULL) {
        if (fd >= 0)
            (void)close(fd);
        return fd < 0 ? fd : -ENOMEM;
    }
    *p = (struct pmi_listener){
        .next = a->pmi_listeners, .agent = a, .number = number, .sessions = 1};
    p->source = (struct source){.fd = fd, .want = want_input, .ready = port_ready, .owner = p};
    if (loop_add(&a->loop, &p->source) < 0) {
        (void)close(fd);
        free(p);
        return -ENOMEM;
    }
    a->pmi_listeners = p;
    return 0;
}

static void listener_close(struct agent *a, uint32_t number)
{
    for (struct pmi_listener **at = &a->pmi_listeners; *at != NULL; at = &(*at)->next) {
        struct pmi_listener *p = *at;
        if (p->number != number)
            continue;
        if (--p->sessions > 0)
            return;
        *at = p->next;
        loop_remove(&a->loop, &p->source);
        (void)close(p->source.fd);
        free(p);
        return;
    }
}

/* The port in "NAME;tcp4://127.0.0.1:PORT" or "NAME;tcp6://[::1]:PORT"; 0 for any other address. */
static uint32_t port_of(const char *uri)
{
    static const char *const forms[] = {";tcp4://127.0.0.1:", ";tcp6://[::1]:"};
    for (uint32_t i = 0; i < 2; i++) {
        const char *at = strstr(uri, forms[i]);
        char *rest;
        if (at == NULL)
            continue;
        unsigned long port = strtoul(at + strlen(forms[i]), &rest, 10);
        if (*rest == '\0' && port > 0 && port <= UINT16_MAX)
            return (uint32_t)port | (i == 1 ? V6 : 0);
    }
    return 0;
}

static int guard_uri(struct session *s, const char *uri)
{
    uint32_t number = port_of(uri);
    if (number == 0)
        return -EADDRNOTAVAIL;
    for (size_t i = 0; i < PMI_PORTS_MAX; i++) {
        if (s->pmi.port[i] == number)
            return 0;
        if (s->pmi.port[i] != 0)
            continue;
        int rc = listener_open(s->agent, number);
        if (rc == 0)
            s->pmi.port[i] = number;
        return rc;
    }
    return -E2BIG;
}

/* --- a session ----------------------------------------------------------------- */

int pmi_guard(struct session *s)
{
    static const char uri[] = "PMIX_SERVER_URI";
    const struct execspec *spec = &s->spec;
    int rc = 0;
    if (spec->pmi_refusal == NULL)
        return 0;
    for (size_t i = 0; i < spec->envc && rc == 0; i++) {
        const char *value = strchr(spec->envp[i], '=');
        if (value != NULL && strncmp(spec->envp[i], uri, sizeof uri - 1) == 0)
            rc = guard_uri(s, value + 1);
    }
    if (rc == 0 && execspec_getenv(spec, PMI_FD) != NULL)
        rc = guard_fd(s);
    if (rc < 0)
        pmi_unguard(s);
    return rc;
}

void pmi_unguard(struct session *s)
{
    close_fd(&s->pmi, &s->agent->loop);
    pmi_started(s);
    for (size_t i = 0; i < PMI_PORTS_MAX; i++) {
        if (s->pmi.port[i] != 0)
            listener_close(s->agent, s->pmi.port[i]);
        s->pmi.port[i] = 0;
    }
}
