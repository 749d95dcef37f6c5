/* SPDX-License-Identifier: Apache-2.0 */
#include "members.h"

#include <errno.h>
#include <getopt.h>
#include <limits.h>
#include <poll.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <unistd.h>

#include "file.h"
#include "protocol.h"
#include "version.h"

#define VARIABLE "VHPC_CLUSTER_HOSTFILE"

enum { FILE_MAX = 16 << 20 };

static const char usage[] =
    "usage: vhpc-members [--follow]\n"
    "\n"
    "Prints a JSON object per line for each guest of this guest's cluster: host, job, ipv4, ipv6\n"
    "and slots, its number of CPUs.\n"
    "\n"
    "  --follow   print a line with \"event\": \"join\" for each guest, and then one for each "
    "that\n"
    "             joins or leaves (\"event\": \"leave\"), until it is ended\n"
    "  --help, --version\n";

/* Lines of the file, in its order and sorted, which point into text. */
struct list {
    struct buf text;
    char **line;
    char **sorted;
    size_t count;
};

static void list_free(struct list *l)
{
    buf_free(&l->text);
    free(l->line);
    free(l->sorted);
    *l = (struct list){0};
}

static int compare(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static bool has(const struct list *l, char *line)
{
    return l->count > 0 && bsearch(&line, l->sorted, l->count, sizeof *l->sorted, compare) != NULL;
}

/* 0, or -errno after one line on stderr. */
static int list_read(const char *folder, struct list *l)
{
    char path[PATH_MAX], *rest = NULL;
    (void)snprintf(path, sizeof path, "%s/members", folder);
    int rc = read_file(path, FILE_MAX, &l->text);
    rc = rc < 0 ? rc : buf_append(&l->text, "", 1);
    if (rc == -ENOENT)
        (void)fputs(MEMBERS_COMMAND ": this guest is in no cluster: submit the job with "
                                    "--vhpc-cluster=NAME\n",
                    stderr);
    else if (rc < 0)
        (void)fprintf(stderr, MEMBERS_COMMAND ": %s: %s\n", path, strerror(-rc));
    if (rc < 0)
        return rc;
    char *text = (char *)l->text.data + l->text.head;
    size_t most = 0;
    for (const char *at = text; (at = strchr(at, '\n')) != NULL; at++)
        most++;
    l->line = calloc(most + 1, sizeof *l->line);
    l->sorted = calloc(most + 1, sizeof *l->sorted);
    if (l->line == NULL || l->sorted == NULL) {
        (void)fprintf(stderr, MEMBERS_COMMAND ": %s\n", strerror(ENOMEM));
        return -ENOMEM;
    }
    for (char *one = strtok_r(text, "\n", &rest); one != NULL && l->count < most;
         one = strtok_r(NULL, "\n", &rest))
        if (one[0] == '{') {
            l->line[l->count] = one;
            l->sorted[l->count++] = one;
        }
    qsort(l->sorted, l->count, sizeof *l->sorted, compare);
    return 0;
}

/* 0, or -errno; that the reader is gone is no error to tell. */
static int flush(FILE *out)
{
    if (fflush(out) == 0 && !ferror(out))
        return 0;
    int number = errno;
    if (number != EPIPE)
        (void)fprintf(stderr, MEMBERS_COMMAND ": cannot write: %s\n", strerror(number));
    return -number;
}

/* Lines of one list that the other one lacks, each with the event as its first field. */
static int print_others(const struct list *of, const struct list *not_in, const char *event,
                        FILE *out)
{
    int rc = 0;
    for (size_t i = 0; i < of->count && rc == 0; i++) {
        if (has(not_in, of->line[i]))
            continue;
        (void)fprintf(out, "{\"event\": \"%s\", %s\n", event, of->line[i] + 1);
        rc = flush(out);
    }
    return rc;
}

int members_print(const char *folder, FILE *out)
{
    struct list l = {0};
    int rc = list_read(folder, &l);
    for (size_t i = 0; rc == 0 && i < l.count; i++)
        (void)fprintf(out, "%s\n", l.line[i]);
    rc = rc < 0 ? rc : flush(out);
    list_free(&l);
    return rc < 0 ? 1 : 0;
}

/* Wait for a new file. 1, 0 if the reader of out is gone, or -errno. */
static int wait_change(int watch, FILE *out)
{
    char events[4096] __attribute__((aligned(__alignof__(struct inotify_event))));
    struct pollfd fds[] = {{.fd = watch, .events = POLLIN}, {.fd = fileno(out)}};
    if (poll(fds, 2, -1) < 0)
        return errno == EINTR ? 1 : -errno;
    if (fds[1].revents != 0)
        return 0;
    return read(watch, events, sizeof events) < 0 && errno != EINTR ? -errno : 1;
}

/* Print what has changed, and keep the new list. */
static int update(const char *folder, struct list *was, FILE *out)
{
    struct list now = {0};
    int rc = list_read(folder, &now);
    rc = rc < 0 ? rc : print_others(was, &now, "leave", out);
    rc = rc < 0 ? rc : print_others(&now, was, "join", out);
    list_free(was);
    *was = now;
    return rc;
}

int members_follow(const char *folder, FILE *out)
{
    struct list was = {0};
    int watch = inotify_init1(IN_CLOEXEC);
    int rc = watch < 0 ? -errno : 1;
    if (rc < 0)
        (void)fprintf(stderr, MEMBERS_COMMAND ": inotify: %s\n", strerror(-rc));
    /* Without the folder there is no cluster, which reading the list tells. */
    else if (inotify_add_watch(watch, folder, IN_MOVED_TO | IN_ONLYDIR) < 0 && errno != ENOENT) {
        rc = -errno;
        (void)fprintf(stderr, MEMBERS_COMMAND ": %s: %s\n", folder, strerror(-rc));
    }
    while (rc > 0) {
        rc = update(folder, &was, out);
        rc = rc < 0 ? rc : wait_change(watch, out);
    }
    list_free(&was);
    if (watch >= 0)
        (void)close(watch);
    return rc < 0 && rc != -EPIPE ? 1 : 0;
}

int members_main(int argc, char **argv)
{
    static const struct option options[] = {{"follow", no_argument, NULL, 'f'},
                                            {"help", no_argument, NULL, 'h'},
                                            {"version", no_argument, NULL, 'V'},
                                            {NULL, 0, NULL, 0}};
    const char *file = getenv(VARIABLE), *end = file != NULL ? strrchr(file, '/') : NULL;
    char folder[PATH_MAX] = VHPC_CLUSTER_FOLDER;
    bool follow = false;
    for (int o; (o = getopt_long(argc, argv, "", options, NULL)) >= 0;) {
        switch (o) {
        case 'f':
            follow = true;
            break;
        case 'h':
            return fputs(usage, stdout) < 0;
        case 'V':
            return puts(MEMBERS_COMMAND " " VHPC_VERSION) < 0;
        default:
            (void)fputs(usage, stderr);
            return 2;
        }
    }
    if (optind < argc) {
        (void)fputs(usage, stderr);
        return 2;
    }
    if (end != NULL && (size_t)(end - file) < sizeof folder)
        (void)snprintf(folder, sizeof folder, "%.*s", (int)(end - file), file);
    return follow ? members_follow(folder, stdout) : members_print(folder, stdout);
}
