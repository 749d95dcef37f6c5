/* SPDX-License-Identifier: Apache-2.0 */
/* vhpc-agent: PID 1 of a lean guest, a unit of a full one, or a command that runs on the host. */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "agent.h"
#include "devnodes.h"
#include "forward.h"
#include "hold.h"
#include "imageenv.h"
#include "members.h"
#include "memory.h"
#include "reach.h"
#include "link.h"
#include "locks.h"
#include "pmix.h"
#include "rootfiles.h"
#include "version.h"

enum { TICK_MS = 50, GRACE_MS = 1000 };

static const char usage[] =
    "usage: vhpc-agent [--port PATH | --fd N] [--call-socket PATH] [--sysfs PATH]\n"
    "                  [--topology-file PATH] [--cluster-folder PATH] [--no-system]\n"
    "       vhpc-agent --call NAME [ARG...]\n"
    "       vhpc-agent --forward PORT [--task N]\n"
    "       vhpc-agent --root-files COMMAND [ARG...]\n"
    "       vhpc-agent --forward-to PROGRAM [ARG...]\n"
    "\n"
    "Runs programs for the host in this guest. As PID 1 it also mounts the file\n"
    "systems that a guest needs, reaps orphans and powers the guest off.\n"
    "\n"
    "  --port PATH         virtio-serial port (default: the one named " VHPC_PORT_NAME ")\n"
    "  --fd N              an open, connected socket instead of a port\n"
    "  --call-socket PATH  socket for programs that run a command on the host\n"
    "                      (default: " VHPC_CALL_SOCKET ")\n"
    "  --sysfs PATH        sysfs with the InfiniBand ports (default: /sys; as PID 1:\n"
    "                      vhpc.agent.sysfs= of the kernel command line)\n"
    "  --topology-file PATH  what NCCL reads (default: " VHPC_TOPOLOGY_FILE ")\n"
    "  --cluster-folder PATH  for lists of the guests of a cluster\n"
    "                      (default: " VHPC_CLUSTER_FOLDER ")\n"
    "  --no-system         do not change this machine: no mounts, no accounts, no power-off\n"
    "  --call NAME         run the command NAME on the host, as a link NAME to this binary does\n"
    "  --forward PORT      connect to this TCP port for `vhpc forward`, which is at the other end\n"
    "                      of standard input and output; --task: only in this task of the step\n"
    "  --root-files COMMAND  run a command in the guest's root as it is below all mounts (root)\n"
    "  --forward-to PROGRAM  start this program for `vhpc ssh`, in the same way\n"
    "  --help, --version\n";

static short want_input(struct source *s)
{
    (void)s;
    return POLLIN;
}

static void signals_ready(struct source *source, short revents)
{
    struct agent *a = source->owner;
    struct signalfd_siginfo info;
    (void)revents;
    while (read(source->fd, &info, sizeof info) == (ssize_t)sizeof info) {
        if (info.ssi_signo == SIGCHLD)
            sessions_reap(a);
        else
            a->stopping = true;
    }
}

/* Signals that ask an init to end; systemd's numbers for poweroff and reboot are among them. */
static int open_signals(struct agent *a)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGPWR);
    sigaddset(&set, SIGUSR2);
    sigaddset(&set, SIGRTMIN + 4);
    sigaddset(&set, SIGRTMIN + 5);
    (void)signal(SIGPIPE, SIG_IGN);
    (void)signal(SIGXFSZ, SIG_IGN);
    if (sigprocmask(SIG_BLOCK, &set, NULL) < 0)
        return -errno;
    a->signals = (struct source){.want = want_input, .ready = signals_ready, .owner = a};
    a->signals.fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    return a->signals.fd < 0 ? -errno : loop_add(&a->loop, &a->signals);
}

static void fill_hello(struct agent *a)
{
    struct utsname u;
    hello_init(&a->hello);
    a->hello.state = VHPC_STATE_UP;
    (void)snprintf(a->hello.agent_version, sizeof a->hello.agent_version, "%s", VHPC_VERSION);
    if (uname(&u) == 0)
        (void)snprintf(a->hello.kernel, sizeof a->hello.kernel, "%s", u.release);
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    ssize_t n = read(fd, a->hello.boot_id, sizeof a->hello.boot_id - 1);
    (void)close(fd);
    a->hello.boot_id[n > 0 ? n : 0] = '\0';
    a->hello.boot_id[strcspn(a->hello.boot_id, "\n")] = '\0';
}

/* One turn of the loop and of all that is polled; 0 or -errno. */
static int turn(struct agent *a, bool *work)
{
    int rc = loop_once(&a->loop, *work ? TICK_MS : -1);
    callers_sweep(a);
    links_sweep(a);
    pmix_sweep(a);
    *work = sessions_tick(a, now_ms());
    rc = rc < 0 ? rc : fabric_tick(a, now_ms(), work);
    rc = rc < 0 ? rc : hold_tick(a, now_ms(), work);
    return rc < 0 ? rc : reach_tick(a, now_ms(), work);
}

static int serve(struct agent *a)
{
    long long until = 0;
    bool work = false;
    int rc = 0;
    while (rc == 0 && a->host_open && !a->stopping) {
        rc = turn(a, &work);
        if (!a->powering_off)
            continue;
        /* Send the reply before the power-off. */
        work = true;
        if (until == 0)
            until = now_ms() + GRACE_MS;
        a->stopping = a->stopping || chan_queued(&a->host) == 0 || now_ms() > until;
    }
    return rc;
}

static bool any_ends(const struct agent *a)
{
    const struct session *s = a->sessions;
    while (s != NULL && s->task.detached && !s->closed)
        s = s->next;
    return s != NULL;
}

/*
 * Kill all sessions and wait a little until they have ended. Detached ones wait for the next host,
 * unless this is the last one.
 */
static void end_sessions(struct agent *a, bool last)
{
    long long until = now_ms() + GRACE_MS;
    bool work = true;
    for (struct session *s = a->sessions; s != NULL; s = s->next)
        if (!s->task.detached || last)
            session_close(s);
    while (any_ends(a) && now_ms() < until && turn(a, &work) == 0)
        work = true;
}

static int run(struct agent *a, const char *port, int fd)
{
    int rc = open_signals(a);
    if (rc == 0)
        rc = callers_listen(a);
    if (rc == 0 && a->system) {
        devnodes_apply("/dev", "/etc/group");
        (void)devnodes_watch(&a->loop); /* without it, later nodes have the kernel's modes */
    }
    if (rc < 0) {
        (void)fprintf(stderr, "vhpc-agent: cannot start: %s\n", strerror(-rc));
        return 1;
    }
    if (a->system)
        gpus_start(&a->gpus, &a->loop, a->sysfs, NVML_LIBRARY, GPU_ROUND_MS);
    while (rc == 0 && !a->stopping) {
        int host = fd >= 0 ? fd : port_open(a, port);
        rc = host < 0 ? host : host_open(a, host, fd < 0);
        if (rc == 0 && a->system && a->locks == 0)
            locks_start(a); /* before the first program; its port has got its name before */
        if (rc == 0)
            rc = serve(a);
        end_sessions(a, a->stopping || fd >= 0);
        if (fd >= 0)
            break; /* a closed socket cannot be opened again */
    }
    if (a->stopping)
        rc = 0;
    if (rc < 0)
        (void)fprintf(stderr, "vhpc-agent: %s\n", strerror(-rc));
    chan_release(&a->host);
    gpus_stop(&a->gpus);
    (void)unlink(a->call_socket);
    cgroup_end(a);
    if (a->is_init || (a->powering_off && a->system))
        system_poweroff();
    return rc < 0;
}

/* The number of an open file descriptor; -1 if the text is not one. */
static int descriptor(const char *text)
{
    char *end;
    long number = strtol(text, &end, 10);
    if (end == text || *end != '\0' || number < 0 || number > INT_MAX)
        return -1;
    return fcntl((int)number, F_GETFD) < 0 ? -1 : (int)number;
}

/* The connection to the host. */
struct endpoint {
    const char *port; /* NULL = the port with VHPC_PORT_NAME */
    int fd;           /* an open socket instead of a port; -1 = none */
};

/* Returns -1 if the agent must run, else the exit status. */
static int read_options(int argc, char **argv, struct agent *a, struct endpoint *host)
{
    static const struct option options[] = {
        {"port", required_argument, NULL, 'p'},
        {"fd", required_argument, NULL, 'f'},
        {"call-socket", required_argument, NULL, 's'},
        {"sysfs", required_argument, NULL, 'y'},
        {"topology-file", required_argument, NULL, 't'},
        {"cluster-folder", required_argument, NULL, 'c'},
        {"no-system", no_argument, NULL, 'n'},
        {"help", no_argument, NULL, 'h'},
        {"version", no_argument, NULL, 'V'},
        {NULL, 0, NULL, 0},
    };
    for (int o; (o = getopt_long(argc, argv, "", options, NULL)) >= 0;) {
        switch (o) {
        case 'p':
            host->port = optarg;
            break;
        case 'f':
            host->fd = descriptor(optarg);
            if (host->fd < 0) {
                (void)fprintf(stderr, "vhpc-agent: --fd=%s: not an open file descriptor\n", optarg);
                return 2;
            }
            break;
        case 's':
            a->call_socket = optarg;
            break;
        case 'y':
            a->sysfs = optarg;
            break;
        case 't':
            a->topology_file = optarg;
            break;
        case 'c':
            a->cluster_folder = optarg;
            break;
        case 'n':
            a->system = false;
            break;
        case 'h':
            return fputs(usage, stdout) < 0;
        case 'V':
            return puts("vhpc-agent " VHPC_VERSION) < 0;
        default:
            (void)fputs(usage, stderr);
            return 2;
        }
    }
    return -1;
}

/*
 * Each session needs several fds, more in all than the 4096 that the kernel gives to the first
 * process; programs get the limits that come with their EXEC.
 */
static void raise_file_limit(void)
{
    const rlim_t wanted = (rlim_t)16 * VHPC_CLIENTS_MAX;
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) < 0)
        return;
    struct rlimit more = {.rlim_cur = wanted, .rlim_max = wanted};
    if (files.rlim_max < wanted && setrlimit(RLIMIT_NOFILE, &more) == 0)
        return;
    files.rlim_cur = files.rlim_max;
    (void)setrlimit(RLIMIT_NOFILE, &files);
}

int main(int argc, char **argv)
{
    static struct image_env image_env;
    static struct agent agent = {.system = true,
                                 .image_env = &image_env,
                                 .call_socket = VHPC_CALL_SOCKET,
                                 .sysfs = "/sys",
                                 .topology_file = VHPC_TOPOLOGY_FILE,
                                 .cluster_folder = VHPC_CLUSTER_FOLDER};
    struct endpoint host = {.fd = -1};
    const char *name = argc > 0 ? argv[0] : "vhpc-agent";
    agent.is_init = getpid() == 1;
    name = strrchr(name, '/') != NULL ? strrchr(name, '/') + 1 : name;
    if (!agent.is_init && argc > 2 && strcmp(argv[1], "--call") == 0)
        command_main(argc - 2, argv + 2, argv[2]);
    if (!agent.is_init && argc > 1 && strcmp(argv[1], "--forward") == 0)
        return forward_main(argc - 1, argv + 1);
    if (!agent.is_init && argc > 2 && strcmp(argv[1], "--root-files") == 0)
        return rootfiles_main(argv + 2);
    if (!agent.is_init && argc > 1 && strcmp(argv[1], "--forward-to") == 0)
        return forward_to_main(argc - 1, argv + 1);
    if (!agent.is_init && strcmp(name, MEMBERS_COMMAND) == 0)
        return members_main(argc, argv);
    if (!agent.is_init && strncmp(name, "vhpc-agent", 10) != 0)
        command_main(argc, argv, name);
    /* The kernel passes parameters of its command line that it does not know to PID 1. */
    int status = agent.is_init ? -1 : read_options(argc, argv, &agent, &host);
    if (status >= 0)
        return status;
    (void)prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    raise_file_limit();
    if (agent.system)
        system_open_root();
    if (agent.is_init) {
        system_mount_all();
        static char sysfs[256];
        if (system_parameter("vhpc.agent.sysfs=", sysfs, sizeof sysfs))
            agent.sysfs = sysfs;
    }
    if (agent.system) {
        image_env_load_all(agent.image_env);
        memory_score(MEMORY_AGENT);
        system_prevent_thrashing();
        system_raise_numbers();
    }
    fill_hello(&agent);
    while (agent.id == 0)
        if (getrandom(&agent.id, sizeof agent.id, 0) < 0 && errno != EINTR)
            break; /* then no step can be continued */
    cgroup_init(&agent);
    return run(&agent, host.port, host.fd);
}
