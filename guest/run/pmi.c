/* SPDX-License-Identifier: Apache-2.0 */
/* How steps that have PMI are handled: what of it is relayed into guests, and what is refused. */
#include "pmi.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "mapping.h"
#include "tlv.h"

enum { EXIT_USAGE = 64, GUESTS_MAX = 64 };

#define PMI_FD "PMI_FD"

/* Variables that Slurm's plugins set for tasks: mpi/pmi2, mpi/pmix, mpi/cray_shasta. */
static const char *const prefixes[] = {"PMI_", "PMI2_", "PMIX_", "SLURM_PMI"};

static unsigned long number_of(const struct execspec *spec, const char *name)
{
    const char *text = execspec_getenv(spec, name);
    return text != NULL ? strtoul(text, NULL, 10) : 0;
}

static bool has_pmi(const struct execspec *spec)
{
    return execspec_getenv(spec, PMI_FD) != NULL || execspec_getenv(spec, "PMIX_NAMESPACE") != NULL;
}

/* A step with PMIx may have inherited PMI_FD from the task that has started it. */
static bool has_pmix(const struct execspec *spec)
{
    const char *type = execspec_getenv(spec, "SLURM_MPI_TYPE");
    return execspec_getenv(spec, PMI_FD) == NULL ||
           (execspec_getenv(spec, "PMIX_NAMESPACE") != NULL && type != NULL &&
            strncmp(type, "pmix", strlen("pmix")) == 0);
}

/*
 * Slurm tells no task whether its step has several components of a heterogeneous job, only that the
 * job has. The node says how many components have a network in common, on which MPI can run.
 */
static bool lacks_components(const struct execspec *spec)
{
    const char *joined = getenv("VHPC_RUN_COMPONENTS");
    unsigned long components = number_of(spec, "SLURM_HET_SIZE");
    return components > 1 && (joined == NULL || strtoul(joined, NULL, 10) < components);
}

/* Guests of the job on each node. */
static uint32_t guests_of(const struct execspec *spec)
{
    unsigned long guests = number_of(spec, "VHPC_JOB_GUESTS");
    return guests >= 1 && guests <= GUESTS_MAX ? (uint32_t)guests : 1;
}

/* A program of this step that uses PMI is ended with a line that says why. 0 or -ENOMEM. */
static int forbid(struct execspec *spec, const char *why)
{
    const char *job = execspec_getenv(spec, "SLURM_JOB_ID");
    const char *step = execspec_getenv(spec, "SLURM_STEP_ID");
    const char *type = execspec_getenv(spec, "SLURM_MPI_TYPE");
    if (asprintf(&spec->pmi_refusal,
                 "step %s.%s runs an MPI program in several tasks (srun --mpi=%s), but %s, or set "
                 "VHPC_PMI=singleton to run each task as a separate program",
                 job != NULL ? job : "?", step != NULL ? step : "?", type != NULL ? type : "...",
                 why) >= 0)
        return 0;
    spec->pmi_refusal = NULL;
    return -ENOMEM;
}

/* Slurm's end of PMI-1 or PMI-2: a stream socket that this process has inherited; -1: none. */
static int server_of(const struct execspec *spec)
{
    const char *text = execspec_getenv(spec, PMI_FD);
    char *rest;
    int value = 0;
    socklen_t len = sizeof value;
    if (text == NULL || *text < '0' || *text > '9')
        return -1;
    errno = 0;
    long fd = strtol(text, &rest, 10);
    if (errno != 0 || *rest != '\0' || fd <= STDERR_FILENO || fd > INT_MAX)
        return -1;
    if (getsockopt((int)fd, SOL_SOCKET, SO_DOMAIN, &value, &len) < 0 || value != AF_UNIX ||
        getsockopt((int)fd, SOL_SOCKET, SO_TYPE, &value, &len) < 0 || value != SOCK_STREAM)
        return -1;
    return (int)fd;
}

/* The program gets the descriptor under the number PMI_NUMBER. */
static int relay_fd(struct pmi *p, struct execspec *spec)
{
    char entry[32];
    int rc = fd_prepare(p->server);
    if (rc < 0)
        return rc;
    spec->fd_dir[PMI_NUMBER] = VHPC_FD_BOTH;
    execspec_drop_env(spec, PMI_FD "=");
    (void)snprintf(entry, sizeof entry, PMI_FD "=%d", PMI_NUMBER);
    return execspec_add_env(spec, entry);
}

/*
 * Guests whose tasks communicate need a network. A job whose guests have none is still able to run
 * steps of one guest.
 */
static int need_network(struct execspec *spec)
{
    int rc = forbid(spec, "the guests of this job have no network between them: submit the job "
                          "with --vhpc-network=job");
    spec->pmi_network = rc == 0;
    return rc;
}

/*
 * Tasks of a node are in several guests, but Open MPI believes that they share memory. Values that
 * the user has set stay.
 */
static int avoid_shared_memory(struct execspec *spec)
{
    static const char *const variables[] = {"OMPI_MCA_btl=^sm", "OMPI_MCA_coll=^sm,han,xhc",
                                            "OMPI_MCA_osc=^sm"};
    int rc = 0;
    for (size_t i = 0; i < sizeof variables / sizeof *variables && rc == 0; i++) {
        char name[40];
        (void)snprintf(name, sizeof name, "%.*s", (int)strcspn(variables[i], "="), variables[i]);
        if (execspec_getenv(spec, name) == NULL)
            rc = execspec_add_env(spec, variables[i]);
    }
    return rc;
}

static int relay_pmix(struct pmi *p, struct execspec *spec, bool several)
{
    if (!pmix_find(spec, &p->pmix)) {
        p->pmix.len = 0;
        return forbid(spec, "PMIX_SERVER_URI* do not name one address of the node's loopback "
                            "interface, and no other is relayed into guests: tell the site's "
                            "support");
    }
    /* An agent that does not relay PMIx ends the program with the line. */
    int rc = several ? need_network(spec)
                     : forbid(spec, "the agent of the image is too old to relay PMIx: rebuild the "
                                    "image");
    spec->pmix = rc == 0;
    return rc == 0 && p->guests > 1 ? avoid_shared_memory(spec) : rc;
}

static int relay(struct pmi *p, struct execspec *spec)
{
    unsigned long tasks = number_of(spec, "SLURM_STEP_NUM_TASKS");
    p->guests = guests_of(spec);
    p->tasks = (uint32_t)(tasks <= MAPPING_TASKS_MAX ? tasks : 0);
    bool several = p->guests > 1 || number_of(spec, "SLURM_STEP_NUM_NODES") > 1;
    if (lacks_components(spec))
        return forbid(spec, "the components of this heterogeneous job have no network in common: "
                            "submit all of them with --vhpc-image, --vhpc-network=job, the same "
                            "number of guests per node and without adapters");
    if (has_pmix(spec))
        return relay_pmix(p, spec, several);
    p->server = server_of(spec);
    if (p->server < 0)
        return forbid(spec, "PMI_FD is not a descriptor that Slurm has opened for this task: start "
                            "the step with srun --mpi=pmi2");
    if (p->guests > 1 && p->tasks == 0)
        return forbid(spec, "its number of tasks (SLURM_STEP_NUM_TASKS) is unknown or too large "
                            "for a job with several guests on a node");
    if (several) {
        int rc = need_network(spec);
        if (rc < 0)
            return rc;
    }
    return relay_fd(p, spec);
}

int pmi_prepare(struct pmi *p, const struct run_options *o, struct execspec *spec)
{
    const char *wish = execspec_getenv(spec, "VHPC_PMI");
    bool single = wish != NULL && strcmp(wish, "singleton") == 0;
    *p = (struct pmi){.server = -1};
    if (wish != NULL && wish[0] != '\0' && !single && strcmp(wish, "relay") != 0) {
        if (number_of(spec, "SLURM_LOCALID") == 0)
            (void)fprintf(stderr, "vhpc: VHPC_PMI=%.64s: must be relay or singleton\n", wish);
        return EXIT_USAGE;
    }
    /*
     * A batch script has no PMI of its own: the variables were in the environment of its
     * submission.
     */
    if (o->script || !has_pmi(spec))
        return 0;
    if (!single && number_of(spec, "SLURM_STEP_NUM_TASKS") != 1)
        return relay(p, spec);
    for (size_t i = 0; i < sizeof prefixes / sizeof prefixes[0]; i++)
        execspec_drop_env(spec, prefixes[i]);
    return 0;
}

/*
 * These fds are closed at their end and never shut down: slurmstepd keeps the task's end of the
 * socket open itself, so that it never reads an end of file. If it does, mpi/pmi2 ends slurmstepd
 * ("this is impossible", 22.05 to 26.05).
 */
int pmi_connect(struct pmi *p, struct front *f)
{
    int other, rc;
    if (f->spec->fd_dir[PMI_NUMBER] == 0)
        return 0;
    other = fcntl(p->server, F_DUPFD_CLOEXEC, 0);
    if (other < 0)
        return -errno;
    f->relayed[PMI_NUMBER].from = p->server;
    f->relayed[PMI_NUMBER].to = other;
    if (p->guests == 1)
        return 0;
    rc = pmi_pump_start(&p->pump, &f->loop, p->server, p->tasks, p->guests);
    if (rc >= 0)
        f->relayed[PMI_NUMBER].from = rc;
    return rc < 0 ? rc : 0;
}

void pmi_tell(struct pmi *p, struct front *f, const struct frame *started)
{
    if (p->guests > 1) {
        p->repeat.filter = &p->pump.filter;
        p->repeat.waits = &p->pump.waits;
    }
    int rc = pmi_repeat(&p->repeat, f, p->server, started);
    if (rc < 0)
        front_give_up(f, FRONT_INTERNAL, -rc, strerror(-rc));
}

void pmi_say_emulated(const struct execspec *spec, const struct frame *started)
{
    struct tlv t;
    const char *step = execspec_getenv(spec, "SLURM_STEP_ID");
    bool relayed = spec->pmix || spec->fd_dir[PMI_NUMBER] != 0;
    bool shared = number_of(spec, "SLURM_STEP_NUM_TASKS") >
                  number_of(spec, "SLURM_STEP_NUM_NODES") * guests_of(spec);
    if (relayed && shared && step != NULL && strcmp(step, "0") == 0 &&
        number_of(spec, "SLURM_PROCID") == 0 &&
        tlv_find(started->payload, started->length, TAG_EMULATED, &t))
        (void)fprintf(stderr, "vhpc: the guests are emulated, because the node has no hardware "
                              "virtualization: MPI ranks of one guest wait long for each other "
                              "(one rank per guest waits less)\n");
}

void pmi_keep(const struct pmi *p)
{
    if (p->server >= 0)
        (void)fcntl(p->server, F_SETFD, 0);
}

enum pmi_end pmi_refused(const struct execspec *spec, const struct front_result *r)
{
    bool known = spec->pmi_refusal != NULL &&
                 (r->text[0] == '\0' || strcmp(r->text, spec->pmi_refusal) == 0);
    /* These are the agent's numbers when it has ended the program for what that has asked of
     * PMI. */
    if (r->end != FRONT_REFUSED || !(known || r->value == EPERM || r->value == ECANCELED))
        return PMI_FINE;
    if (r->text[0] != '\0')
        (void)fprintf(stderr, "vhpc: %s\n", r->text);
    return r->value == ECANCELED ? PMI_REFUSED_ALONE : PMI_REFUSED;
}
