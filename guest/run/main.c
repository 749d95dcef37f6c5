/* SPDX-License-Identifier: Apache-2.0 */
/* vhpc-run: see run.h and vhpc-run --help. */
#include "pmi.h"
#include "run.h"
#include "x11.h"

enum { EXIT_REFUSED = 126 };

int main(int argc, char **argv)
{
    static struct front front;
    static struct host_calls calls;
    struct run_options o;
    static struct execspec spec;
    static struct pmi pmi;
    static struct x11 x11;
    int status = run_parse(argc, argv, &o);
    if (status < 0)
        status = run_console(&o);
    if (status >= 0)
        return status;
    int rc = run_describe(&o, &spec);
    if (rc == 0)
        rc = pmi_prepare(&pmi, &o, &spec);
    if (rc != 0)
        return rc < 0 ? -rc : rc;
    x11_prepare(&x11, &spec);
    front = (struct front){.spec = &spec,
                           .timeout_ms = o.timeout_s * 1000,
                           .call_frame = host_calls_frame,
                           .started = host_calls_started,
                           .child_exited = host_calls_reap,
                           .tick = host_calls_tick,
                           .watched = true,
                           .no_room = run_drop,
                           .group_fd = o.script ? run_watch_group() : -1,
                           .owner = &calls};
    host_calls_init(&calls, &front, o.socket, &pmi, &x11);
    rc = pmi_connect(&pmi, &front);
    if (rc < 0)
        return -rc;
    run_watch_parent(&front);
    struct front_result result = front_run(&front, o.socket);
    run_unwatch_group();
    host_calls_end(&calls);
    if (run_is_lost(&result))
        return run_end_lost(&o, &result, &calls);
    run_report_memory(&spec, &result);
    run_report_dropped(&spec);
    pmi_keep(&pmi);
    run_copy_and_retry(&o, &result, argv);
    switch (pmi_refused(&spec, &result)) {
    case PMI_REFUSED_ALONE:
        run_end_refused(&o, &calls);
        return EXIT_REFUSED;
    case PMI_REFUSED:
        return EXIT_REFUSED;
    case PMI_FINE:
        break;
    }
    status = run_save(&o, &result);
    if (status >= 0)
        return status;
    front_exit_as(&result, "vhpc-run");
}
