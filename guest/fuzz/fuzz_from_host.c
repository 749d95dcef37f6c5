/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A hostile host: arbitrary bytes from the port into the agent. No program is executed and no file
 * is touched: programs end before they start, because the agent cannot fork here, and control
 * operations are only checked.
 */
#include <errno.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "agent.h"
#include "cluster.h"
#include "fabric.h"
#include "hold.h"
#include "imageenv.h"
#include "reach.h"
#include "link.h"
#include "rig.h"

/* Replaces fork at link time: an input may not start programs. */
pid_t __wrap_fork(void);

pid_t __wrap_fork(void)
{
    errno = EAGAIN;
    return -1;
}

/* Replaces script_write at link time: an input may not write files. */
int __wrap_script_write(const struct execspec *spec, bool *written);

int __wrap_script_write(const struct execspec *spec, bool *written)
{
    (void)spec;
    *written = false;
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static char no_cgroup[] = "/nonexistent"; /* a hold begins, and fails */
    struct image_env image_env = {0};
    struct agent a = {.system = false,
                      .cgroup = no_cgroup,
                      .image_env = &image_env,
                      .sysfs = "/nonexistent",
                      .topology_file = "/nonexistent/topology"};
    int pair[2];
    bool work = false;
    hello_init(&a.hello);
    /* Ports that are already found, so that the environment of programs is changed for them. */
    a.fabric = calloc(1, sizeof *a.fabric);
    if (a.fabric == NULL)
        abort();
    a.fabric->want.key[0] = 0x9000;
    a.fabric->found = (struct ib_found){.port = {{.device = "mlx5_0", .number = 1}}, .count = 1};
    if (fabric_name(a.fabric) < 0)
        abort();
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0)
        abort();
    if (host_open(&a, pair[1], false) < 0)
        abort();
    rig_feed(&a.loop, pair[0], data, size);
    (void)fabric_tick(&a, now_ms(), &work);
    (void)reach_tick(&a, now_ms(), &work);
    (void)hold_tick(&a, now_ms(), &work);
    for (struct session *s = a.sessions; s != NULL; s = s->next)
        session_close(s);
    (void)sessions_tick(&a, now_ms());
    links_sweep(&a);
    chan_release(&a.host);
    loop_free(&a.loop);
    fabric_free(a.fabric);
    free(a.interface);
    free(a.nodelist);
    free(a.host_names);
    cluster_forget(&a);
    free(a.start_dir);
    image_env_free(&image_env);
    (void)close(pair[0]);
    return 0;
}
