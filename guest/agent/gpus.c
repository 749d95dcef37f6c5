/* SPDX-License-Identifier: Apache-2.0 */
/* Decision: NVML is loaded by a process of its own */
#include "gpus.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "child.h"
#include "gpusysfs.h"
#include "protocol.h"
#include "tlv.h"

enum { NOBODY = 65534, PROGRAM = 3, NO_EXEC = 127 };

/* The program vhpc-nvml. */
__asm__(".section .rodata\n"
        ".balign 16\n"
        "vhpc_nvml_program: .incbin \"" VHPC_NVML_PROGRAM "\"\n"
        "vhpc_nvml_end: .byte 0\n"
        ".text\n");
extern const char vhpc_nvml_program[], vhpc_nvml_end[];

static void say(struct gpus *g)
{
    (void)fprintf(stderr, "vhpc-agent: no more figures of GPUs: %s\n", g->missing);
}

/* --- records ---------------------------------------------------------------------- */

/* DDDD:BB:DD.F, and NULs behind it. */
static bool is_address(const char *text)
{
    static const char form[] = "xxxx:xx:xx.x";
    for (size_t i = 0; i < GPU_ADDRESS_SIZE; i++) {
        char want = i < sizeof form ? form[i] : '\0';
        bool hex = (text[i] >= '0' && text[i] <= '9') || (text[i] >= 'a' && text[i] <= 'f');
        if (want == 'x' ? !hex : text[i] != want)
            return false;
    }
    return true;
}

static struct gpu *gpu_of(struct gpus *g, const char *address)
{
    for (size_t i = 0; i < g->count; i++)
        if (strcmp(g->gpu[i].address, address) == 0)
            return &g->gpu[i];
    if (g->count == GPU_COUNT_MAX)
        return NULL;
    struct gpu *new = &g->gpu[g->count++];
    *new = (struct gpu){0};
    memcpy(new->address, address, sizeof new->address);
    return new;
}

static bool count_record(struct gpus *g, const struct gpu_record *r)
{
    static const uint64_t most[] = {
        [GPU_BUSY] = 10000, [GPU_MEMORY] = (uint64_t)1 << 50, [GPU_POWER] = 100000000};
    struct gpu *gpu = is_address(r->address) ? gpu_of(g, r->address) : NULL;
    if (gpu == NULL)
        return false;
    for (size_t i = 0; i < GPU_FIGURES; i++) {
        if (!(r->has >> i & 1) || r->value[i] > most[i])
            continue;
        gpu->count[i]++;
        if (i != GPU_MEMORY)
            gpu->sum[i] += r->value[i];
        else if (r->value[i] > gpu->peak)
            gpu->peak = r->value[i];
    }
    return true;
}

static short want_input(struct source *s)
{
    (void)s;
    return POLLIN;
}

static void leave(struct gpus *g, struct gpu_reader *reader)
{
    if (reader->source.fd < 0)
        return;
    loop_remove(g->loop, &reader->source);
    (void)close(reader->source.fd);
    reader->source.fd = -1;
}

static void records_ready(struct source *source, short revents)
{
    struct gpus *g = source->owner;
    struct gpu_reader *reader = source == &g->nvml.source ? &g->nvml : &g->sysfs;
    struct gpu_record r;
    (void)revents;
    for (int i = 0; i < GPU_COUNT_MAX; i++) {
        ssize_t n = read(source->fd, &r, sizeof r);
        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        if (n == (ssize_t)sizeof r && count_record(g, &r))
            continue;
        reader->bad = n > 0;
        if (reader->bad && reader->pid > 0)
            (void)kill(reader->pid, SIGKILL);
        leave(g, reader);
        return;
    }
}

/* --- processes -------------------------------------------------------------------- */

/*
 * Give up everything but descriptors 0 to 2, and the program (-1: none), which becomes PROGRAM.
 * False if that is not possible.
 */
static bool shed(int out, int program, pid_t parent)
{
    static const struct rlimit none = {0, 0};
    int null = open("/dev/null", O_RDWR);
    if (null < 0 || dup2(null, 0) < 0 || dup2(null, 2) < 0 || dup2(out, 1) < 0)
        return false;
    if (program >= 0 && program != PROGRAM && dup3(program, PROGRAM, O_CLOEXEC) < 0)
        return false;
    (void)setsid();
    if (geteuid() == 0 && (setgroups(0, NULL) < 0 || setresgid(NOBODY, NOBODY, NOBODY) < 0 ||
                           setresuid(NOBODY, NOBODY, NOBODY) < 0))
        return false;
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 || setrlimit(RLIMIT_CORE, &none) < 0)
        return false;
    return child_shed(program >= 0 ? PROGRAM + 1 : PROGRAM, parent);
}

_Noreturn static void read_sysfs(const char *sysfs, int round_ms)
{
    static struct gpu_sysfs state;
    static struct gpu_record record[GPU_COUNT_MAX];
    struct timespec rest = {.tv_sec = round_ms / 1000, .tv_nsec = round_ms % 1000 * 1000000L};
    state.root = sysfs;
    for (;;) {
        size_t count = gpu_sysfs_round(&state, now_ms(), record, GPU_COUNT_MAX);
        for (size_t i = 0; i < count; i++)
            if (write(STDOUT_FILENO, &record[i], sizeof record[i]) != (ssize_t)sizeof record[i])
                _exit(1);
        (void)nanosleep(&rest, NULL);
    }
}

_Noreturn static void read_nvml(const char *library, int round_ms)
{
    char name[] = "vhpc-nvml", path[256], pause[16];
    char *const argv[] = {name, path, pause, NULL};
    char *const envp[] = {NULL};
    (void)snprintf(path, sizeof path, "%s", library);
    (void)snprintf(pause, sizeof pause, "%d", round_ms);
    (void)fexecve(PROGRAM, argv, envp);
    _exit(NO_EXEC);
}

/* A file with the program, or -errno. */
static int program_file(void)
{
    size_t size = (size_t)(vhpc_nvml_end - vhpc_nvml_program);
    int fd = memfd_create("vhpc-nvml", MFD_CLOEXEC);
    if (fd < 0)
        return -errno;
    if (write(fd, vhpc_nvml_program, size) == (ssize_t)size)
        return fd;
    (void)close(fd);
    return -EIO;
}

/* Start a process with a pipe; library NULL: it reads sysfs. */
static int start(struct gpus *g, struct gpu_reader *reader, const char *sysfs, const char *library,
                 int round_ms)
{
    int end[2], program = library != NULL ? program_file() : -1;
    pid_t parent = getpid();
    if (library != NULL && program < 0)
        return program;
    if (pipe2(end, O_CLOEXEC) < 0) {
        int rc = -errno;
        if (library != NULL)
            (void)close(program);
        return rc;
    }
    (void)fcntl(end[0], F_SETFL, O_NONBLOCK);
    reader->pid = fork();
    if (reader->pid == 0) {
        if (!shed(end[1], program, parent))
            _exit(1);
        if (library == NULL)
            read_sysfs(sysfs, round_ms);
        read_nvml(library, round_ms);
    }
    int rc = reader->pid < 0 ? -errno : 0;
    (void)close(end[1]);
    if (library != NULL)
        (void)close(program);
    reader->source =
        (struct source){.fd = end[0], .want = want_input, .ready = records_ready, .owner = g};
    if (rc == 0)
        rc = loop_add(g->loop, &reader->source);
    if (rc < 0) {
        (void)close(end[0]);
        reader->source.fd = -1;
    }
    return rc;
}

void gpus_start(struct gpus *g, struct loop *loop, const char *sysfs, const char *library,
                int round_ms)
{
    bool nvidia, other;
    *g = (struct gpus){.loop = loop, .sysfs.source.fd = -1, .nvml.source.fd = -1};
    gpu_find(sysfs, &nvidia, &other);
    int rc = nvidia ? start(g, &g->nvml, sysfs, library, round_ms) : 0;
    if (rc == 0 && other)
        rc = start(g, &g->sysfs, sysfs, NULL, round_ms);
    if (rc < 0) {
        (void)snprintf(g->missing, sizeof g->missing, "no process to read them: %s", strerror(-rc));
        say(g);
    }
}

void gpus_reaped(struct gpus *g, pid_t pid, int status)
{
    struct gpu_reader *reader = pid == g->nvml.pid ? &g->nvml : &g->sysfs;
    const char *who = reader == &g->nvml ? "NVML of the image" : "the process that reads sysfs";
    if (pid != reader->pid || pid <= 0)
        return;
    reader->pid = 0;
    int code = WIFEXITED(status) ? WEXITSTATUS(status) : 0;
    int number = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    if (reader->bad)
        (void)snprintf(g->missing, sizeof g->missing, "%s has sent a malformed record", who);
    else if (number == SIGALRM)
        (void)snprintf(g->missing, sizeof g->missing, "%s has not answered for %d s", who,
                       NVML_ROUND_S);
    else if (number != 0)
        (void)snprintf(g->missing, sizeof g->missing, "%s was ended by signal %d", who, number);
    else if (code == NVML_NO_LIBRARY)
        (void)snprintf(g->missing, sizeof g->missing, "the image has no libnvidia-ml.so.1");
    else if (code == NVML_NO_FUNCTION)
        (void)snprintf(g->missing, sizeof g->missing, "%s is too old", who);
    else if (code == NO_EXEC)
        (void)snprintf(g->missing, sizeof g->missing, "the image has no glibc to load NVML");
    else
        (void)snprintf(g->missing, sizeof g->missing, "%s has ended with status %d", who, code);
    say(g);
}

void gpus_stop(struct gpus *g)
{
    struct gpu_reader *const both[] = {&g->nvml, &g->sysfs};
    for (size_t i = 0; i < 2; i++) {
        pid_t pid = both[i]->pid;
        both[i]->pid = 0;
        if (pid > 0 && kill(pid, SIGKILL) == 0)
            (void)waitpid(pid, NULL, 0);
        if (g->loop != NULL)
            leave(g, both[i]);
    }
}

/* --- the reply -------------------------------------------------------------------- */

static int put_gpu(const struct gpu *gpu, struct buf *b)
{
    struct buf row = {0};
    int rc = tlv_put_str(&row, TAG_GPU_ADDRESS, gpu->address);
    if (rc == 0 && gpu->count[GPU_BUSY] > 0)
        rc = tlv_put_u64(&row, TAG_BUSY_E4, gpu->sum[GPU_BUSY] / gpu->count[GPU_BUSY]);
    if (rc == 0 && gpu->count[GPU_MEMORY] > 0)
        rc = tlv_put_u64(&row, TAG_MEMORY_BYTES, gpu->peak);
    if (rc == 0 && gpu->count[GPU_POWER] > 0)
        rc = tlv_put_u64(&row, TAG_POWER_MW, gpu->sum[GPU_POWER] / gpu->count[GPU_POWER]);
    if (rc == 0)
        rc = tlv_put(b, TAG_GPU, buf_head(&row), row.len);
    buf_free(&row);
    return rc;
}

int gpus_put(const struct gpus *g, struct buf *b)
{
    int rc = 0;
    for (size_t i = 0; i < g->count && rc == 0; i++)
        rc = put_gpu(&g->gpu[i], b);
    if (rc == 0 && g->missing[0] != '\0')
        rc = tlv_put_str(b, TAG_GPU_MISSING, g->missing);
    return rc;
}
