/* SPDX-License-Identifier: Apache-2.0 */
#include "pmix.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "link.h"
#include "pmixrelay.h"
#include "pmixwatch.h"

#define URI "PMIX_SERVER_URI"
#define NAMESPACE "PMIX_NAMESPACE"

/*
 * Open MPI sends its messages to the server, and Slurm's prints none of them. This one says that
 * the program calls MPI_Comm_spawn or the like although its user has switched that off
 * (OMPI_MCA_mpi_dynamics_enabled=0). True: why has the function.
 */
static bool says_unsupported(const uint8_t *data, size_t len, char *why, size_t size)
{
    static const char unsupported[] = "MPI function that is not supported", name[] = "MPI_Comm_";
    const uint8_t *text = memmem(data, len, unsupported, sizeof unsupported - 1), *end = data + len;
    if (text == NULL || (text = memmem(text, (size_t)(end - text), name, sizeof name - 1)) == NULL)
        return false;
    size_t n = sizeof name - 1;
    while (text + n < end && n < size / 2 && ((text[n] >= 'a' && text[n] <= 'z') || text[n] == '_'))
        n++;
    (void)snprintf(why, size, "calls %.*s", (int)n, (const char *)text);
    return true;
}

/* Slurm's server answers such a request with an error; Open MPI then ends the step, silently. */
static bool pass(struct exchange *x, uint8_t number, const uint8_t *data, size_t len)
{
    static const char *const calls[] = {
        [PMIXWATCH_SPAWN] = "MPI_Comm_spawn",
        [PMIXWATCH_ACCEPT] = "MPI_Comm_accept",
        [PMIXWATCH_CONNECT] = "MPI_Comm_connect",
    };
    struct link *l = x->owner;
    enum pmixwatch_found found = pmixwatch_read(&l->watch, data, len);
    char why[128];
    (void)number;
    if (found != PMIXWATCH_NOTHING)
        (void)snprintf(why, sizeof why, "calls %s", calls[found]);
    else if (!says_unsupported(data, len, why, sizeof why))
        return true;
    pmi_not_offered(l->session, why);
    return false;
}

/* Without the server an MPI library would run the task as a separate program. */
static void end_program(struct session *s, const struct frame *f)
{
    struct error_info e;
    bool clear = error_parse(f, &e) == 0 && e.text[0] != '\0';
    free(s->pmi.failure);
    s->pmi.failure = strdup(clear ? e.text : "the connection to the PMIx server has failed");
    if (s->pmi.failure != NULL)
        task_refuse(&s->task, EPERM, s->pmi.failure);
}

static const struct link_kind kind = {
    .call = (char[]){VHPC_CALL_PMIX}, .pass = pass, .failed = end_program};

/* --- connections ---------------------------------------------------------------- */

struct pmix_connection {
    struct pmix_connection *next;
    struct session *session; /* NULL: it is over */
    struct pmixrelay relay;
};

/* The namespace for the program, and for the server of the present step. */
static const char *own_namespace(const struct session *s)
{
    return execspec_getenv(&s->spec, NAMESPACE);
}

static const char *other_namespace(const struct session *s)
{
    return execspec_getenv(s->now.envc > 0 ? &s->now : &s->spec, NAMESPACE);
}

/* A request that begins now could wait for a task that is about to be detached. */
static bool is_quiet(const struct pmixrelay *r)
{
    const struct pmix_connection *c = r->owner;
    return c->session->parked || hold_is_quiet(c->session->agent);
}

static void changed(struct pmixrelay *r)
{
    const struct pmix_connection *c = r->owner;
    pmix_renew(c->session);
}

static void failed(struct pmixrelay *r)
{
    struct pmix_connection *c = r->owner;
    pmi_refuse(c->session, ECANCELED, "cannot continue: its new PMIx server does not accept it");
    pmix_renew(c->session);
}

static void open_connection(struct session *s, int fd)
{
    struct agent *a = s->agent;
    struct pmix_connection *c = calloc(1, sizeof *c);
    int on = 1;
    if (c == NULL) {
        (void)close(fd);
        return;
    }
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    c->session = s;
    c->relay = (struct pmixrelay){
        .loop = &a->loop, .is_quiet = is_quiet, .changed = changed, .failed = failed, .owner = c};
    fd = pmixrelay_start(&c->relay, fd, own_namespace(s), other_namespace(s));
    if (fd < 0) {
        free(c);
        return;
    }
    c->next = a->pmix;
    a->pmix = c;
    link_open(s, fd, &kind);
}

const char *pmix_obstacle(const struct session *s)
{
    const char *why = NULL;
    for (struct pmix_connection *c = s->agent->pmix; c != NULL && why == NULL; c = c->next)
        if (c->session == s)
            why = pmixrelay_obstacle(&c->relay);
    return why;
}

bool pmix_leave(struct session *s)
{
    bool gone = true;
    for (struct pmix_connection *c = s->agent->pmix; c != NULL; c = c->next)
        if (c->session == s)
            gone = pmixrelay_leave(&c->relay) && gone;
    return gone && links_count(s, &kind) == 0;
}

static void renew(struct pmix_connection *c)
{
    int fd = pmixrelay_renew(&c->relay, other_namespace(c->session));
    if (fd >= 0)
        link_open(c->session, fd, &kind);
    else
        pmi_refuse(c->session, ECANCELED, "needs more memory than the guest has");
}

void pmix_renew(struct session *s)
{
    bool telling = false;
    if (s->parked || s->task.detached || s->task.reaped)
        return;
    for (struct pmix_connection *c = s->agent->pmix; c != NULL; c = c->next) {
        if (c->session != s)
            continue;
        if (c->relay.phase == PMIXRELAY_LEFT)
            renew(c);
        telling = telling || c->relay.phase == PMIXRELAY_TELLING;
    }
    s->telling = telling;
    (void)session_freeze(s);
}

static void end_connections(const struct session *s)
{
    for (struct pmix_connection *c = s->agent->pmix; c != NULL; c = c->next)
        if (c->session == s) {
            pmixrelay_close(&c->relay);
            c->session = NULL;
        }
}

void pmix_sweep(struct agent *a)
{
    for (struct pmix_connection **p = &a->pmix; *p != NULL;) {
        struct pmix_connection *c = *p;
        if (c->relay.phase != PMIXRELAY_OVER) {
            p = &c->next;
            continue;
        }
        *p = c->next;
        free(c);
    }
}

/* --- the listening socket ------------------------------------------------------- */

/* Connections wait while the program has not started or has too many calls, and during a hold. */
static short listener_want(struct source *source)
{
    const struct session *s = source->owner;
    bool running = s->started && s->task.exchange.flow.phase == FLOW_RUNNING;
    bool quiet = s->parked || hold_is_quiet(s->agent);
    return running && !quiet && calls_alive(s) < VHPC_CALLS_MAX ? POLLIN : 0;
}

static void listener_ready(struct source *source, short revents)
{
    struct session *s = source->owner;
    (void)revents;
    int fd = accept4(source->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0)
        return;
    if (s->spec.pmi_refusal == NULL && s->last_call < UINT32_MAX) {
        open_connection(s, fd);
        return;
    }
    pmi_used(s);
    /*
     * After the processes have ended, so that none takes the end of the connection for an answer.
     */
    (void)close(fd);
}

/* A socket on a free port of 127.0.0.1; 0 or -errno. */
static int open_listener(struct session *s, in_port_t *port)
{
    struct sockaddr_in at = {.sin_family = AF_INET};
    socklen_t len = sizeof at;
    int rc = 0, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -errno;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(fd, (struct sockaddr *)&at, sizeof at) < 0 || listen(fd, SOMAXCONN) < 0 ||
        getsockname(fd, (struct sockaddr *)&at, &len) < 0)
        rc = -errno;
    s->pmi.listener =
        (struct source){.fd = fd, .want = listener_want, .ready = listener_ready, .owner = s};
    if (rc == 0)
        rc = loop_add(&s->agent->loop, &s->pmi.listener);
    if (rc < 0) {
        (void)close(fd);
        s->pmi.listener.fd = -1;
    }
    *port = ntohs(at.sin_port);
    return rc;
}

/* "NAME;tcp4://ADDRESS:PORT" gets our address. */
static int change_uri(char **entry, in_port_t port)
{
    char *changed;
    size_t len = strcspn(*entry, "=");
    len += strcspn(*entry + len, ";");
    if (asprintf(&changed, "%.*s;tcp4://127.0.0.1:%u", (int)len, *entry, port) < 0)
        return -ENOMEM;
    free(*entry);
    *entry = changed;
    return 0;
}

/*
 * The server's stores in shared memory are on the host, so data comes in messages. Of the
 * authentication methods only "native" works: the guest has no munge.
 */
static int choose_modules(struct execspec *spec)
{
    static const char *const variables[] = {"PMIX_GDS_MODULE=hash", "PMIX_MCA_gds=hash",
                                            "PMIX_MCA_psec=native", "PMIX_SECURITY_MODE=native"};
    int rc = 0;
    for (size_t i = 0; i < sizeof variables / sizeof *variables && rc == 0; i++) {
        char name[32];
        (void)snprintf(name, sizeof name, "%.*s", (int)strcspn(variables[i], "=") + 1,
                       variables[i]);
        execspec_drop_env(spec, name);
        rc = execspec_add_env(spec, variables[i]);
    }
    return rc;
}

int pmix_listen(struct session *s)
{
    struct execspec *spec = &s->spec;
    in_port_t port = 0;
    int rc = 0;
    for (size_t i = 0; i < spec->envc && rc == 0; i++) {
        if (strncmp(spec->envp[i], URI, sizeof URI - 1) != 0)
            continue;
        if (s->pmi.listener.fd < 0)
            rc = open_listener(s, &port);
        if (rc == 0)
            rc = change_uri(&spec->envp[i], port);
    }
    if (rc == 0 && s->pmi.listener.fd >= 0 && spec->pmi_refusal == NULL)
        rc = choose_modules(spec);
    return rc;
}

void pmix_close(struct session *s)
{
    end_connections(s);
    if (s->pmi.listener.fd >= 0) {
        loop_remove(&s->agent->loop, &s->pmi.listener);
        (void)close(s->pmi.listener.fd);
        s->pmi.listener.fd = -1;
    }
}
