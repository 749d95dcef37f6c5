/* SPDX-License-Identifier: Apache-2.0 */
/* vhpc-run: see run.h and vhpc-run --help. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "run.h"

/* A line of the node's state file; the SPANK plugin has the same limit. */
enum { STATE_LINE = 4097 };
enum { EXIT_REFUSED = 126 };

/*
 * Why the node itself has ended this job's guest: then its state file, $VHPC_RUN_STATE, has the
 * status "failed" and a message.
 */
static bool ended_by_node(char *why, size_t size)
{
    static char line[STATE_LINE];
    const char *path = getenv("VHPC_RUN_STATE");
    bool failed = false;
    FILE *file = path != NULL ? fopen(path, "re") : NULL;
    if (file == NULL)
        return false;
    why[0] = '\0';
    while (fgets(line, sizeof line, file) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        if (strcmp(line, "status=failed") == 0)
            failed = true;
        else if (strncmp(line, "message=", strlen("message=")) == 0)
            (void)snprintf(why, size, "%s", line + strlen("message="));
    }
    (void)fclose(file);
    return failed && why[0] != '\0';
}

/* Reports which guest is gone, by what a user knows: job and node. */
static void report_lost(const struct front_result *r)
{
    static char why[STATE_LINE];
    char host[256] = "this node";
    const char *job = getenv("SLURM_JOB_ID");
    const char *node = getenv("SLURMD_NODENAME");
    if (ended_by_node(why, sizeof why)) {
        (void)fprintf(stderr, "vhpc: %s\n", why);
        return;
    }
    (void)gethostname(host, sizeof host - 1);
    (void)fprintf(stderr, "vhpc: the guest of job %s on %s %s (%s)\n", job != NULL ? job : "(none)",
                  node != NULL ? node : host,
                  r->end == FRONT_TIMEOUT ? "does not answer" : "is gone", r->text);
}

int main(int argc, char **argv)
{
    static struct front front;
    static struct host_calls calls;
    struct run_options o;
    static struct execspec spec;
    int status = run_parse(argc, argv, &o);
    if (status >= 0)
        return status;
    int rc = run_describe(&o, &spec);
    if (rc == 0)
        rc = run_pmi(&o, &spec);
    if (rc != 0)
        return rc < 0 ? -rc : rc;
    front = (struct front){.spec = &spec,
                           .timeout_ms = o.timeout_s * 1000,
                           .call_frame = host_calls_frame,
                           .child_exited = host_calls_reap,
                           .tick = host_calls_tick,
                           .watched = true,
                           .group_fd = o.script ? run_watch_group() : -1,
                           .owner = &calls};
    host_calls_init(&calls, &front);
    struct front_result result = front_run(&front, o.socket);
    run_unwatch_group();
    if (result.end == FRONT_LOST || result.end == FRONT_TIMEOUT) {
        report_lost(&result);
        return 125;
    }
    run_copy_and_retry(&o, &result, argv);
    if (run_pmi_refused(&spec, &result))
        return EXIT_REFUSED;
    front_exit_as(&result, "vhpc-run");
}
