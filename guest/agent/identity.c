/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The identity operation: creates the job's user in the guest with the same name and ids, allows
 * sudo, and sets up the cluster's host names and commands.
 */
#include "identity.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <net/if.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "accounts.h"
#include "agent.h"
#include "cluster.h"
#include "commands.h"
#include "devnodes.h"
#include "directory.h"
#include "file.h"
#include "hosts.h"
#include "imageenv.h"
#include "members.h"

static int complain(int number, char *text, size_t size, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

static int complain(int number, char *text, size_t size, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    (void)vsnprintf(text, size, format, args);
    va_end(args);
    return number < 0 ? number : -number;
}

/* Whether a field has no character that could end it or its line. */
static bool is_clean(const char *s, const char *forbidden)
{
    if (s == NULL)
        return true;
    for (; *s != '\0'; s++)
        if ((unsigned char)*s < 0x20 || *s == 0x7f || strchr(forbidden, *s) != NULL)
            return false;
    return true;
}

/*
 * Whether a line of passwd(5) or group(5) can begin with a name: glibc skips leading blanks, and
 * takes "#" for a comment, "+" and "-" for entries of NIS. Directories of sites have names with
 * spaces, slashes and commas.
 */
static bool is_entry_name(const char *s)
{
    return s[0] != '\0' && strchr("#+- ", s[0]) == NULL && is_clean(s, ":");
}

static bool is_name(const char *s, const char *extra)
{
    if (s == NULL || *s == '\0' || *s == '-' || *s == '.' || strlen(s) > 64)
        return false;
    for (; *s != '\0'; s++)
        if (!isalnum((unsigned char)*s) && strchr(extra, *s) == NULL)
            return false;
    return true;
}

static int check(const struct identity *id, char *text, size_t size)
{
    if (!is_name(id->hostname, "-."))
        return complain(EINVAL, text, size, "HOSTNAME is not a host name");
    if (id->user != NULL && (!is_entry_name(id->user) || id->uid == 0))
        return complain(EINVAL, text, size, "USER_NAME is not a user name, or USER_UID is 0");
    if (id->user != NULL && (id->home == NULL || id->home[0] != '/' || !is_clean(id->home, ":") ||
                             !is_clean(id->shell, ":") || !is_clean(id->gecos, ":")))
        return complain(EINVAL, text, size,
                        "USER_HOME, USER_SHELL or USER_GECOS is not valid in /etc/passwd");
    for (size_t i = 0; i < id->host_count; i++)
        if (!is_clean(id->hosts[i], ""))
            return complain(EINVAL, text, size, "HOSTS_LINE is not a line of /etc/hosts");
    for (size_t i = 0; i < id->group_count; i++)
        if (!is_entry_name(id->groups[i].name))
            return complain(EINVAL, text, size, "GROUP has no group name");
    for (size_t i = 0; i < id->command_count; i++)
        if (!is_name(id->commands[i], "-_."))
            return complain(EINVAL, text, size, "COMMAND is not a command name");
    if (id->timezone != NULL && id->timezone[0] != '\0' &&
        (!is_name(id->timezone, "-_+/.") || strstr(id->timezone, "..") != NULL))
        return complain(EINVAL, text, size, "TIMEZONE is not a time zone");
    return 0;
}

static int apply_names(const struct agent *a, const struct identity *id)
{
    struct buf b = {0};
    static const char head[] = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n";
    if (sethostname(id->hostname, strlen(id->hostname)) < 0)
        return -errno;
    int rc = buf_append(&b, id->hostname, strlen(id->hostname));
    rc = rc < 0 ? rc : buf_append(&b, "\n", 2);
    rc = rc < 0 ? rc : write_file("/etc/hostname", 0644, (const char *)buf_head(&b));
    b.head = b.len = 0;
    rc = rc < 0 ? rc : buf_append(&b, head, sizeof head - 1);
    for (size_t i = 0; i < id->host_count && rc == 0; i++) {
        rc = buf_append(&b, id->hosts[i], strlen(id->hosts[i]));
        rc = rc < 0 ? rc : buf_append(&b, "\n", 1);
    }
    rc = rc < 0 ? rc : hosts_write(HOSTS_FILE, &b, cluster_hosts(a));
    buf_free(&b);
    return rc;
}

static int apply_loopback(void)
{
    struct ifreq request = {.ifr_name = "lo"};
    int rc = 0, fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -errno;
    if (ioctl(fd, SIOCGIFFLAGS, &request) < 0)
        rc = -errno;
    request.ifr_flags = (short)(request.ifr_flags | IFF_UP | IFF_RUNNING);
    if (rc == 0 && ioctl(fd, SIOCSIFFLAGS, &request) < 0)
        rc = -errno;
    (void)close(fd);
    return rc;
}

static int apply_user(const struct identity *id)
{
    char *line = NULL;
    /*
     * "*" and not "x": there is no password in a shadow file, and the account check of sudo would
     * regard an "x" without shadow entry as a locked account.
     */
    if (asprintf(&line, "%s:*:%u:%u:%s:%s:%s", id->user, id->uid, id->gid,
                 id->gecos != NULL ? id->gecos : "", id->home,
                 id->shell != NULL && access(id->shell, X_OK) == 0 ? id->shell : "/bin/sh") < 0)
        return -ENOMEM;
    int rc = accounts_put("/etc/passwd", id->user, id->uid, line);
    free(line);
    if (rc == 0 && access("/etc/sudoers.d", F_OK) == 0) {
        char rule[80];
        /* By uid: a user name may have characters that are special for sudo. */
        (void)snprintf(rule, sizeof rule, "#%u ALL=(ALL:ALL) NOPASSWD: ALL\n", id->uid);
        rc = write_file("/etc/sudoers.d/vhpc", 0440, rule);
    }
    return rc < 0 ? rc : directory_make_private(id->home, id->uid, id->gid);
}

static int apply_groups(const struct identity *id)
{
    for (size_t i = 0; i < id->group_count; i++) {
        char *line = NULL;
        const struct identity_group *g = &id->groups[i];
        /* a comma ends the name of a member */
        bool member = id->user != NULL && g->gid != id->gid && strchr(id->user, ',') == NULL;
        if (g->gid == 0)
            continue;
        if (asprintf(&line, "%s:*:%u:%s", g->name, g->gid, member ? id->user : "") < 0)
            return -ENOMEM;
        devnodes_regroup("/dev", "/etc/group", g->name, g->gid);
        int rc = accounts_put("/etc/group", g->name, g->gid, line);
        free(line);
        if (rc < 0)
            return rc;
    }
    return 0;
}

/*
 * The image's own file of the host's zone, or else the host's: a link tells programs the name of
 * the zone, and images may lack zones. No /etc/localtime is UTC.
 */
static int apply_timezone(const struct identity *id)
{
    static const char local[] = "/etc/localtime", name_file[] = "/etc/timezone";
    char path[128], line[80];
    int rc = 0;
    (void)snprintf(path, sizeof path, "/usr/share/zoneinfo/%s", id->timezone);
    if (id->timezone[0] != '\0' && access(path, R_OK) == 0)
        rc = unlink(local) < 0 && errno != ENOENT ? -errno : symlink(path, local) < 0 ? -errno : 0;
    else if (id->zone_len > 0)
        rc = write_file_data(local, 0644, id->zone, id->zone_len);
    else if (unlink(local) < 0 && errno != ENOENT)
        rc = -errno;
    if (rc < 0 || access(name_file, F_OK) < 0)
        return rc;
    if (id->timezone[0] == '\0')
        return unlink(name_file) < 0 ? -errno : 0;
    (void)snprintf(line, sizeof line, "%s\n", id->timezone);
    return write_file(name_file, 0644, line);
}

/* Slurm's commands are this binary, also where the image has its own. */
static int apply_commands(const struct agent *a, const struct identity *id)
{
    static char members[] = MEMBERS_COMMAND;
    static char *const own[] = {members};
    char self[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    if (n < 0)
        return -errno;
    self[n] = '\0';
    int rc = directory_make("/usr/bin", 0755); /* images of busybox may have only /bin */
    if (rc < 0)
        return rc;
    const char *of_image = image_env_get(a->image_env, "PATH");
    if (of_image != NULL)
        commands_cover(self, of_image, id->commands, id->command_count);
    commands_cover(self, COMMANDS_PATH, id->commands, id->command_count);
    rc = commands_link(self, "/usr/bin", own, 1);
    return rc < 0 ? rc : commands_link(self, "/usr/bin", id->commands, id->command_count);
}

int identity_apply(const struct agent *a, const struct identity *id, char *text, size_t size)
{
    int rc = check(id, text, size);
    if (rc < 0 || !a->system)
        return rc;
    if ((rc = apply_names(a, id)) < 0)
        return complain(rc, text, size, "cannot set the host name: %s", strerror(-rc));
    if ((rc = apply_loopback()) < 0)
        return complain(rc, text, size, "cannot bring lo up: %s", strerror(-rc));
    if ((rc = apply_groups(id)) < 0)
        return complain(rc, text, size, "cannot write /etc/group: %s", strerror(-rc));
    if (id->user != NULL && (rc = apply_user(id)) < 0)
        return complain(rc, text, size, "cannot create the user's account: %s", strerror(-rc));
    if (id->timezone != NULL && (rc = apply_timezone(id)) < 0)
        return complain(rc, text, size, "cannot set the time zone: %s", strerror(-rc));
    if ((rc = apply_commands(a, id)) < 0)
        return complain(rc, text, size, "cannot link the host's commands: %s", strerror(-rc));
    return 0;
}
