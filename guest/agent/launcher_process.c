/* SPDX-License-Identifier: Apache-2.0 */
#include "launcher_process.h"

#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    SHELLS_MAX = 3,  /* between a launcher and its srun */
    STATE_MS = 1000, /* until a process stops or ends */
    PATH_SIZE = 64,
    COMMAND_LINE_MAX = 1 << 16,
};

/* The instruction that calls the kernel, as PTRACE_PEEKTEXT reads it. */
#if defined(__x86_64__)
#define SYSCALL_BYTES 0x050fL
#define SYSCALL_MASK 0xffffL
#elif defined(__aarch64__)
#define SYSCALL_BYTES 0xd4000001L /* svc #0 */
#define SYSCALL_MASK 0xffffffffL
#endif

static FILE *open_of(pid_t pid, const char *file)
{
    char path[PATH_SIZE];
    (void)snprintf(path, sizeof path, "/proc/%d/%s", (int)pid, file);
    return fopen(path, "re");
}

static void read_name(pid_t pid, char name[LAUNCHER_NAME_MAX])
{
    FILE *file = open_of(pid, "comm");
    name[0] = '\0';
    if (file == NULL)
        return;
    if (fgets(name, LAUNCHER_NAME_MAX, file) == NULL)
        name[0] = '\0';
    (void)fclose(file);
    name[strcspn(name, "\n")] = '\0';
}

bool launcher_is(pid_t pid, char name[LAUNCHER_NAME_MAX])
{
    static const char *const names[] = {"mpirun", "mpiexec", "prte", "orte", "oshrun"};
    read_name(pid, name);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strncmp(name, names[i], strlen(names[i])) == 0)
            return true;
    return false;
}

static pid_t parent_of(pid_t pid)
{
    char line[PATH_SIZE];
    int parent = 0;
    FILE *file = open_of(pid, "status");
    if (file == NULL)
        return 0;
    while (parent == 0 && fgets(line, sizeof line, file) != NULL)
        if (strncmp(line, "PPid:", 5) == 0)
            parent = (int)strtol(line + 5, NULL, 10);
    (void)fclose(file);
    return parent;
}

pid_t launcher_find(char name[LAUNCHER_NAME_MAX])
{
    static const char *const shells[] = {"sh", "bash", "dash", "busybox"};
    pid_t pid = getppid();
    for (int i = 0; i <= SHELLS_MAX && pid > 1; i++) {
        bool is_shell = false;
        if (launcher_is(pid, name))
            return pid;
        for (size_t k = 0; k < sizeof shells / sizeof *shells; k++)
            is_shell = is_shell || strcmp(name, shells[k]) == 0;
        pid = is_shell ? parent_of(pid) : 0;
    }
    return 0;
}

/*
 * The descriptor itself shares the position in a file with those who write next, and may be a
 * socket. Linux before 5.6 can only open it again.
 */
int launcher_stderr(pid_t pid)
{
    char path[PATH_SIZE];
    int process = (int)syscall(SYS_pidfd_open, pid, 0);
    int fd = process < 0 ? -1 : (int)syscall(SYS_pidfd_getfd, process, STDERR_FILENO, 0);
    if (process >= 0)
        (void)close(process);
    if (fd >= 0)
        return fd;
    (void)snprintf(path, sizeof path, "/proc/%d/fd/2", (int)pid);
    return open(path, O_WRONLY | O_APPEND | O_NOCTTY | O_CLOEXEC);
}

static bool has_part(const char *text, const char *word)
{
    static const char ends[] = "/,=";
    for (const char *p = text; *p != '\0'; p += strspn(p, ends)) {
        size_t len = strcspn(p, ends);
        if (len == strlen(word) && strncmp(p, word, len) == 0)
            return true;
        p += len;
    }
    return false;
}

bool launcher_has_word(pid_t pid, const char *word)
{
    char *text = calloc(1, COMMAND_LINE_MAX + 1);
    FILE *file = open_of(pid, "cmdline");
    bool found = false;
    if (text != NULL && file != NULL) {
        size_t len = fread(text, 1, COMMAND_LINE_MAX, file);
        for (size_t at = 0; at < len && !found; at += strlen(text + at) + 1)
            found = has_part(text + at, word);
    }
    if (file != NULL)
        (void)fclose(file);
    free(text);
    return found;
}

/* The next state of a process that is traced, as waitpid(2) has it; -1: none comes in time. */
static int next_state(pid_t pid)
{
    for (int waited = 0; waited < STATE_MS; waited++) {
        int status;
        pid_t found = waitpid(pid, &status, __WALL | WNOHANG);
        if (found == pid)
            return status;
        if (found < 0 && errno != EINTR)
            return -1;
        (void)poll(NULL, 0, 1);
    }
    return -1;
}

/* Set the registers for exit_group(code); returns where the process continues. */
#if defined(__x86_64__)
static unsigned long long set_exit_call(struct user_regs_struct *regs, int code)
{
    regs->rax = SYS_exit_group;
    regs->rdi = (unsigned long long)code;
    regs->orig_rax = ULLONG_MAX; /* do not restart the call that the stop has interrupted */
    return regs->rip;
}
#elif defined(__aarch64__)
/* One instruction further: there the kernel does not restart the call that the stop has interrupted
   (do_signal() in arch/arm64/kernel/signal.c). */
static unsigned long long set_exit_call(struct user_regs_struct *regs, int code)
{
    regs->regs[8] = SYS_exit_group;
    regs->regs[0] = (unsigned long long)code;
    regs->pc += 4;
    return regs->pc;
}
#endif

/*
 * No signal makes a program return a code that its caller has chosen, so the process calls
 * exit_group itself: tracing it, we set the registers of this call, and the instruction that it
 * continues with (in its own copy of the page). Source: ptrace(2), syscall(2).
 */
static bool prepare_exit(pid_t pid, int code)
{
    struct user_regs_struct regs;
    struct iovec all = {.iov_base = &regs, .iov_len = sizeof regs};
    if (ptrace(PTRACE_GETREGSET, pid, NT_PRSTATUS, &all) < 0)
        return false;
    unsigned long long at = set_exit_call(&regs, code);
    errno = 0;
    long text = ptrace(PTRACE_PEEKTEXT, pid, at, NULL);
    if (errno != 0)
        return false;
    text = (text & ~SYSCALL_MASK) | SYSCALL_BYTES;
    return ptrace(PTRACE_POKETEXT, pid, at, text) == 0 &&
           ptrace(PTRACE_SETREGSET, pid, NT_PRSTATUS, &all) == 0;
}

/* False if the process may not be traced, as with kernel.yama.ptrace_scope, or does not end. */
static bool exits(pid_t pid, int code)
{
    if (ptrace(PTRACE_SEIZE, pid, NULL, NULL) < 0 || ptrace(PTRACE_INTERRUPT, pid, NULL, NULL) < 0)
        return false;
    int state = next_state(pid);
    if (state < 0 || !WIFSTOPPED(state) || !prepare_exit(pid, code))
        return false;
    /* No signal may reach it: MPICH's mpiexec, no longer traced, has ended with 0 (seen). */
    do {
        if (ptrace(PTRACE_CONT, pid, NULL, NULL) < 0)
            return false;
        state = next_state(pid);
    } while (state >= 0 && WIFSTOPPED(state));
    return state >= 0;
}

void launcher_exit(pid_t pid, int code)
{
    if (!exits(pid, code))
        (void)kill(pid, SIGKILL);
}
