/* SPDX-License-Identifier: Apache-2.0 */
/*
 * First program of a guest: says on the console which CPUs run and how interrupts
 * reach them, and switches the guest off.  It does nothing unless it is PID 1 with the name that
 * the guest's kernel gives it.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/klog.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LOG = 1 << 20, READ_ALL = 3 };

static void say(const char *path)
{
    char line[256];
    FILE *file = fopen(path, "r");

    if (file == NULL || fgets(line, sizeof line, file) == NULL)
        line[0] = '\0';
    printf("cpus: %s %s\n", path, line);
    if (file != NULL)
        (void)fclose(file);
}

int main(int argc, char **argv)
{
    char *log;

    if (getpid() != 1 || argc < 1 || strcmp(argv[0], "/init") != 0)
        return 2;
    log = calloc(1, LOG);

    (void)mkdir("/proc", 0755);
    (void)mkdir("/sys", 0755);
    (void)mkdir("/dev", 0755);
    (void)mount("proc", "/proc", "proc", 0, NULL);
    (void)mount("sysfs", "/sys", "sysfs", 0, NULL);
    (void)mount("devtmpfs", "/dev", "devtmpfs", 0, NULL);
    if (freopen("/dev/console", "w", stdout) == NULL)
        return 1;
    say("/sys/devices/system/cpu/online");
    say("/sys/devices/system/node/online");
    if (log != NULL && klogctl(READ_ALL, log, LOG - 1) > 0)
        for (char *line = strtok(log, "\n"); line != NULL; line = strtok(NULL, "\n"))
            if (strstr(line, "DMAR") != NULL || strstr(line, "APIC") != NULL)
                printf("cpus: log %s\n", line);
    printf("cpus: end\n");
    (void)fflush(stdout);
    sleep(1); /* the serial port is slower than we are */
    (void)reboot(RB_POWER_OFF);
    return 0;
}
