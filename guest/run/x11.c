/* SPDX-License-Identifier: Apache-2.0 */
/* Decision: X11 is relayed to a socket of the user */
#include "x11.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "buf.h"
#include "tcptable.h"
#include "tlv.h"
#include "xauth.h"

#define VARIABLE "XAUTHORITY"

/* Displays that Slurm takes (x11_forwarding.c of slurmstepd, 22.05 to 26.05); ssh begins at 10. */
enum { DISPLAY_FIRST = 20, DISPLAY_LAST = 99 };

/* Once for the tasks of a step on a node. */
__attribute__((format(printf, 1, 2))) static void say(const char *format, ...)
{
    const char *task = getenv("SLURM_LOCALID");
    va_list words;
    if (task != NULL && strcmp(task, "0") != 0)
        return;
    va_start(words, format);
    (void)fputs("vhpc: no X11 in the guest: ", stderr);
    (void)vfprintf(stderr, format, words);
    (void)fputc('\n', stderr);
    va_end(words);
}

/* --- the display ---------------------------------------------------------------- */

/*
 * slurmstepd makes its socket with the ids of the job's user, so no user can name a port on which
 * another user, or a service of the node, listens.
 */
static bool is_display(const struct tcp_row *row, const void *arg)
{
    const struct x11_display *display = arg;
    bool loopback = row->family == AF_INET6 ? IN6_IS_ADDR_LOOPBACK(&row->local.in6)
                                            : ntohl(row->local.in.s_addr) >> 24 == IN_LOOPBACKNET;
    return row->listens && loopback && row->uid == getuid() &&
           row->local_port == VHPC_X11_PORT + display->number;
}

static bool find_server(const struct x11_display *display, struct link_server *server)
{
    struct tcp_row row;
    if (display->number < DISPLAY_FIRST || display->number > DISPLAY_LAST ||
        !tcptable_find(is_display, display, &row))
        return false;
    *server = (struct link_server){.name = "the X11 display of the job"};
    if (row.family == AF_INET6) {
        server->at.in6 = (struct sockaddr_in6){.sin6_family = AF_INET6,
                                               .sin6_addr = row.local.in6,
                                               .sin6_port = htons(row.local_port)};
        server->len = sizeof server->at.in6;
    } else {
        server->at.in = (struct sockaddr_in){
            .sin_family = AF_INET, .sin_addr = row.local.in, .sin_port = htons(row.local_port)};
        server->len = sizeof server->at.in;
    }
    return true;
}

/* --- the cookie ----------------------------------------------------------------- */

/* The user's file, with the user's rights. 0 or -errno. */
static int read_file(const char *path, struct buf *data)
{
    uint8_t part[16384];
    ssize_t n = 0;
    int rc = 0, fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        return -errno;
    do {
        n = read(fd, part, sizeof part);
        if (n < 0 && errno != EINTR)
            rc = -errno;
        else if (n > 0 && data->len + (size_t)n > XAUTH_FILE_MAX)
            rc = -EFBIG;
        else if (n > 0)
            rc = buf_append(data, part, (size_t)n);
    } while (rc == 0 && n != 0);
    (void)close(fd);
    return rc;
}

static bool find_cookie(const struct execspec *spec, struct x11_display *display)
{
    const char *named = execspec_getenv(spec, VARIABLE), *home = execspec_getenv(spec, "HOME");
    char path[PATH_MAX], host[HOST_NAME_MAX + 1] = "";
    struct buf data = {0};
    if (named != NULL)
        (void)snprintf(path, sizeof path, "%s", named);
    else
        (void)snprintf(path, sizeof path, "%s/.Xauthority", home != NULL ? home : "");
    (void)gethostname(host, sizeof host - 1);
    int rc = read_file(path, &data);
    bool found = rc == 0 && xauth_find(buf_head(&data), data.len, host, display);
    buf_free(&data);
    if (rc < 0)
        say("cannot read %s: %s", path, strerror(-rc));
    else if (!found)
        say("%s has no MIT-MAGIC-COOKIE-1 for DISPLAY=%s", path, execspec_getenv(spec, "DISPLAY"));
    return found;
}

void x11_prepare(struct x11 *x, struct execspec *spec)
{
    struct x11_display display = {.wanted = true};
    const char *named = execspec_getenv(spec, "DISPLAY");
    *x = (struct x11){.spec = spec};
    if (named == NULL || !xauth_display(named, &display.number) ||
        !find_server(&display, &x->server))
        return;
    if (find_cookie(spec, &display))
        spec->x11 = display;
    else
        x->server.len = 0;
}

/* --- the guest ------------------------------------------------------------------ */

void x11_started(const struct x11 *x, const struct frame *started)
{
    struct tlv t;
    uint32_t number = 0;
    unsigned port = VHPC_X11_PORT + x->spec->x11.number;
    if (x->server.len == 0)
        return;
    if (!tlv_find(started->payload, started->length, TAG_DISPLAY, &t) || tlv_u32(&t, &number) < 0)
        say("the agent of the image is too old: rebuild the image");
    else if (number == EADDRINUSE)
        say("another program there uses port %u", port);
    else if (number != 0)
        say("the agent cannot serve port %u: %s", port, strerror((int)(number & 0xff)));
}

int x11_restore(const struct x11 *x, struct execspec *spec)
{
    const char *value = execspec_getenv(spec, VARIABLE), *own = getenv(VARIABLE);
    char end[64], *entry = NULL;
    int len = snprintf(end, sizeof end, "/" VHPC_X11_FOLDER "/" VHPC_X11_FILE, x->spec->x11.number);
    if (x->server.len == 0 || value == NULL || strlen(value) < (size_t)len ||
        strcmp(value + strlen(value) - (size_t)len, end) != 0)
        return 0;
    execspec_drop_env(spec, VARIABLE "=");
    if (own == NULL)
        return 0;
    if (asprintf(&entry, VARIABLE "=%s", own) < 0)
        return -ENOMEM;
    int rc = execspec_add_env(spec, entry);
    free(entry);
    return rc;
}
