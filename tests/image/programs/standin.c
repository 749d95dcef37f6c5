/* SPDX-License-Identifier: Apache-2.0 */
/* Stands in for the guest agent in boot tests: as PID 1 it says what it sees, then powers off.
 *
 * Each line is "standin: KEY VALUE".  It must never power off the machine that runs the tests,
 * so it does nothing at all unless it is PID 1 with the agent's path.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void copy_lines(const char *key, const char *path)
{
    char line[512];
    FILE *file = fopen(path, "r");

    if (file == NULL) {
        printf("standin: missing %s\n", path);
        return;
    }
    while (fgets(line, sizeof line, file) != NULL)
        printf("standin: %s %s%s", key, line, strchr(line, '\n') != NULL ? "" : "\n");
    fclose(file);
}

static void run(const char *key, char *const argv[])
{
    int out[2], status = -1;
    char text[512];
    ssize_t n;
    pid_t child;

    if (pipe(out) != 0)
        return;
    child = fork();
    if (child == 0) {
        dup2(out[1], STDOUT_FILENO);
        close(out[0]);
        close(out[1]);
        execv(argv[0], argv);
        _exit(127);
    }
    close(out[1]);
    n = read(out[0], text, sizeof text - 1);
    text[n > 0 ? n : 0] = '\0';
    close(out[0]);
    waitpid(child, &status, 0);
    printf("standin: %s status=%d %s%s", key, status, text, strchr(text, '\n') != NULL ? "" : "\n");
}

/* Reads the file of vhpc.agent.read= and says how many bytes came, how it ended, and how long it
 * took. */
static void read_named(void)
{
    static char cmdline[4096], block[1 << 20];
    const int source = open("/proc/cmdline", O_RDONLY);
    struct timespec begin, end;
    long long bytes = 0;
    char *path;
    ssize_t n;
    int fd;

    if (source < 0 || read(source, cmdline, sizeof cmdline - 1) <= 0)
        return;
    close(source);
    path = strstr(cmdline, "vhpc.agent.read=");
    if (path == NULL)
        return;
    path += strlen("vhpc.agent.read=");
    path[strcspn(path, " \n")] = '\0';
    clock_gettime(CLOCK_MONOTONIC, &begin);
    fd = open(path, O_RDONLY);
    while ((n = fd < 0 ? -1 : read(fd, block, sizeof block)) > 0)
        bytes += n;
    clock_gettime(CLOCK_MONOTONIC, &end);
    printf("standin: read %lld %s\nstandin: read-ms %lld\n", bytes,
           n < 0 ? strerror(errno) : "to the end",
           (end.tv_sec - begin.tv_sec) * 1000LL + (end.tv_nsec - begin.tv_nsec) / 1000000);
    if (fd >= 0)
        close(fd);
}

int main(int argc, char **argv)
{
    struct timespec uptime;
    struct utsname kernel;
    struct stat st;
    int fd;

    if (argc == 2 && strcmp(argv[1], "--version") == 0) {
        puts("standin 0.0.1");
        return 0;
    }
    if (getpid() != 1 || strcmp(argv[0], "/run/vhpc/vhpc-agent") != 0)
        return 2;
    clock_gettime(CLOCK_MONOTONIC, &uptime);
    uname(&kernel);
    printf("standin: started %ld.%03ld %s\n", (long)uptime.tv_sec, uptime.tv_nsec / 1000000,
           kernel.release);
    fflush(stdout);
    copy_lines("mount", "/proc/self/mounts");
    read_named();
    fd = open("/etc/written", O_CREAT | O_WRONLY, 0644);
    printf("standin: overlay %s\n", fd >= 0 && write(fd, "x", 1) == 1 ? "writable" : "read-only");
    printf("standin: port %s\n", access("/sys/class/virtio-ports", F_OK) == 0 ? "yes" : "no");
    printf("standin: machine-id %lld\n",
           stat("/etc/machine-id", &st) == 0 ? (long long)st.st_size : -1LL);
    printf("standin: modes %o %o\n", stat("/tmp", &st) == 0 ? st.st_mode & 07777 : 0,
           stat("/usr/bin/sudo", &st) == 0 ? st.st_mode & 07777 : 0);
    fflush(stdout);
    run("shell", (char *[]){"/bin/sh", "-c", "id -u; exit 7", NULL});
    run("python",
        (char *[]){"/usr/bin/python3", "-c", "import json, ssl, subprocess; print(6 * 7)", NULL});
    run("modprobe", (char *[]){"/sbin/modprobe", "virtio_net", NULL});
    fflush(stdout);
    sync();
    reboot(RB_POWER_OFF);
    return 1;
}
