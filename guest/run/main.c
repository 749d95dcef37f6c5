/* vhpc-run: see run.h and vhpc-run --help. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "run.h"

/* Which guest is gone, in the words a user knows: job and node. */
static void report_lost(const struct front_result *r)
{
    char host[256] = "this node";
    const char *job = getenv("SLURM_JOB_ID");
    const char *node = getenv("SLURMD_NODENAME");
    const char *console = getenv("VHPC_RUN_CONSOLE");
    (void)gethostname(host, sizeof host - 1);
    (void)fprintf(stderr, "vhpc: the guest of job %s on %s %s (%s)%s%s\n",
                  job != NULL ? job : "(none)", node != NULL ? node : host,
                  r->end == FRONT_TIMEOUT ? "does not answer" : "is gone", r->text,
                  console != NULL ? "; its console: " : "", console != NULL ? console : "");
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
    if (rc < 0)
        return -rc;
    front = (struct front){.spec = &spec,
                           .timeout_ms = o.timeout_s * 1000,
                           .call_frame = host_calls_frame,
                           .child_exited = host_calls_reap,
                           .tick = host_calls_tick,
                           .watched = true,
                           .owner = &calls};
    host_calls_init(&calls, &front);
    struct front_result result = front_run(&front, o.socket);
    if (result.end == FRONT_LOST || result.end == FRONT_TIMEOUT) {
        report_lost(&result);
        return 125;
    }
    front_exit_as(&result, "vhpc-run");
}
