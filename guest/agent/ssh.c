/* SPDX-License-Identifier: Apache-2.0 */
#include "ssh.h"

#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "commands.h"
#include "file.h"
#include "memory.h"

#define PRIVATE_HEAD "-----BEGIN OPENSSH PRIVATE KEY-----\n"

enum { BACKLOG = 128, PART_MAX = 1024 };

/* Lines of text: printable ASCII and line ends. */
static bool is_text(const char *s, size_t most, bool lines)
{
    size_t len = s != NULL ? strlen(s) : 0;
    for (size_t i = 0; i < len; i++)
        if ((s[i] < ' ' || s[i] > '~') && !(lines && s[i] == '\n'))
            return false;
    return len > 0 && len <= most;
}

static bool is_private_key(const char *s)
{
    return is_text(s, SSH_KEY_MAX, true) && strncmp(s, PRIVATE_HEAD, strlen(PRIVATE_HEAD)) == 0;
}

int ssh_check(const struct ssh_want *want, char *text, size_t size)
{
    const char *wrong = NULL;
    if (!is_private_key(want->host_key) || !is_private_key(want->user_key))
        wrong = "HOST_KEY or USER_KEY is not a private key of OpenSSH";
    else if (!is_text(want->host_public, SSH_PUBLIC_MAX, false) ||
             !is_text(want->user_public, SSH_PUBLIC_MAX, false))
        wrong = "HOST_PUBLIC or USER_PUBLIC is not a line";
    else if (want->uid == 0)
        wrong = "USER_UID is 0";
    if (wrong == NULL)
        return 0;
    (void)snprintf(text, size, "%s", wrong);
    return -EINVAL;
}

static int put(struct buf *b, const char *text)
{
    return buf_append(b, text, strlen(text));
}

static int write_text(const char *folder, const char *name, mode_t mode, const char *content)
{
    char path[PATH_MAX];
    int n = snprintf(path, sizeof path, "%s/%s", folder, name);
    return n < 0 || (size_t)n >= sizeof path ? -ENAMETOOLONG
                                             : replace_file(path, mode, content, strlen(content));
}

static int write_server(const struct ssh_want *want, const char *folder)
{
    char settings[PART_MAX], keys[SSH_PUBLIC_MAX + 2], name[64];
    /* No passwords, no PAM: the job's user has neither in a guest. %U: only this user has a key. */
    int n = snprintf(settings, sizeof settings,
                     "HostKey %s/host_key\n"
                     "AuthorizedKeysFile %s/authorized_keys-%%U %s/cluster_keys-%%U\n"
                     "AuthenticationMethods publickey\n"
                     "PasswordAuthentication no\n"
                     "KbdInteractiveAuthentication no\n"
                     "PermitRootLogin no\n"
                     "UsePAM no\n"
                     "X11Forwarding no\n"
                     "PrintMotd no\n"
                     "PrintLastLog no\n"
                     "LogLevel ERROR\n"
                     "AcceptEnv LANG LC_*\n"
                     "Subsystem sftp internal-sftp\n",
                     folder, folder, folder);
    if (n < 0 || (size_t)n >= sizeof settings)
        return -ENAMETOOLONG;
    (void)snprintf(keys, sizeof keys, "%s\n", want->user_public);
    (void)snprintf(name, sizeof name, "authorized_keys-%u", want->uid);
    int rc = write_text(folder, "host_key", 0600, want->host_key);
    rc = rc < 0 ? rc : write_text(folder, name, 0644, keys);
    return rc < 0 ? rc : write_text(folder, "sshd_config", 0644, settings);
}

/* A file that applies settings to these hosts; a job and its cluster have one each. */
static int write_hosts(const char *folder, const char *client_folder, const char *file,
                       const char *names)
{
    char settings[PART_MAX], path[PATH_MAX];
    struct buf b = {0};
    int n = snprintf(settings, sizeof settings,
                     "    IdentityFile %s/id_ed25519\n"
                     "    IdentitiesOnly yes\n"
                     "    PreferredAuthentications publickey\n"
                     "    UserKnownHostsFile %s/known_hosts %s/cluster_known_hosts\n"
                     "    GlobalKnownHostsFile %s/known_hosts\n"
                     "    HostKeyAlias " SSH_HOST_ALIAS "\n"
                     "    StrictHostKeyChecking yes\n"
                     "    UpdateHostKeys no\n"
                     "    CheckHostIP no\n"
                     "    ServerAliveInterval %d\n"
                     "    ServerAliveCountMax %d\n",
                     folder, folder, folder, folder, SSH_ALIVE_INTERVAL_S, SSH_ALIVE_COUNT);
    if (n < 0 || (size_t)n >= sizeof settings ||
        strlen(client_folder) + sizeof "/ssh_config.d" > sizeof path)
        return -ENAMETOOLONG;
    (void)snprintf(path, sizeof path, "%s/ssh_config.d", client_folder);
    if (mkdir(path, 0755) < 0 && errno != EEXIST)
        return -errno;
    int rc = put(&b, "Host ");
    rc = rc < 0 ? rc : put(&b, names);
    rc = rc < 0 ? rc : put(&b, "\n");
    rc = rc < 0 ? rc : put(&b, settings);
    rc = rc < 0 ? rc : buf_append(&b, "", 1);
    rc = rc < 0 ? rc : write_text(path, file, 0644, (const char *)buf_head(&b));
    buf_free(&b);
    return rc;
}

/* All guests of a job have the same host key. */
static int write_client(const struct ssh_want *want, const char *folder, const char *client_folder,
                        const char *names)
{
    char known[SSH_PUBLIC_MAX + 32];
    (void)snprintf(known, sizeof known, SSH_HOST_ALIAS " %s\n", want->host_public);
    int rc = write_text(folder, "known_hosts", 0644, known);
    return rc < 0 ? rc : write_hosts(folder, client_folder, "vhpc.conf", names);
}

static int write_user_key(const struct ssh_want *want, const char *folder)
{
    char path[PATH_MAX];
    int n = snprintf(path, sizeof path, "%s/id_ed25519", folder);
    if (n < 0 || (size_t)n >= sizeof path)
        return -ENAMETOOLONG;
    int rc = write_file(path, 0600, want->user_key);
    return rc == 0 && chown(path, want->uid, want->gid) < 0 ? -errno : rc;
}

int ssh_write(const struct ssh_want *want, const char *folder, const char *client_folder,
              const char *names, char *text, size_t size)
{
    int rc = mkdir(folder, 0755) < 0 && errno != EEXIST ? -errno : 0;
    rc = rc < 0 ? rc : write_server(want, folder);
    rc = rc < 0 ? rc : write_user_key(want, folder);
    rc = rc < 0 ? rc : write_client(want, folder, client_folder, names);
    if (rc < 0)
        (void)snprintf(text, size, "cannot write keys of ssh: %s", strerror(-rc));
    return rc;
}

int ssh_write_cluster(const struct ssh_cluster *cluster, const char *folder,
                      const char *client_folder, char *text, size_t size)
{
    char name[64];
    (void)snprintf(name, sizeof name, "cluster_keys-%u", cluster->uid);
    int rc = mkdir(folder, 0755) < 0 && errno != EEXIST ? -errno : 0;
    rc = rc < 0 ? rc : write_text(folder, name, 0644, cluster->keys);
    rc = rc < 0 ? rc : write_text(folder, "cluster_known_hosts", 0644, cluster->known);
    rc = rc < 0 ? rc : write_hosts(folder, client_folder, "vhpc-cluster.conf", cluster->names);
    if (rc < 0)
        (void)snprintf(text, size, "cannot write keys of the cluster: %s", strerror(-rc));
    return rc;
}

int ssh_apply_cluster(const struct agent *a, const struct ssh_cluster *cluster, char *text,
                      size_t size)
{
    if (!a->system || access(SSH_CLIENT_FOLDER, F_OK) < 0)
        return 0; /* an image without ssh */
    return ssh_write_cluster(cluster, SSH_FOLDER, SSH_CLIENT_FOLDER, text, size);
}

/* The place of a process that has not been started; SSH_CONNECTIONS_MAX: none is free. */
static size_t free_place(const struct ssh *s)
{
    size_t i = 0;
    while (i < SSH_CONNECTIONS_MAX && s->child[i] != 0)
        i++;
    return i;
}

static short want_connections(struct source *source)
{
    return free_place(source->owner) < SSH_CONNECTIONS_MAX ? POLLIN : 0;
}

/* In the child: sshd for one connection. */
static _Noreturn void become_sshd(const struct agent *a, int link)
{
    static char config[] = SSH_FOLDER "/sshd_config";
    static char path[] = "PATH=" COMMANDS_PATH;
    char *const argv[] = {SSH_DAEMON, "-i", "-e", "-f", config, NULL};
    char *const envp[] = {path, NULL};
    const struct rlimit unlimited = {RLIM_INFINITY, RLIM_INFINITY};
    sigset_t none;
    sigemptyset(&none);
    (void)signal(SIGPIPE, SIG_DFL);
    (void)signal(SIGXFSZ, SIG_DFL);
    (void)sigprocmask(SIG_SETMASK, &none, NULL);
    (void)setsid();
    cgroup_enter_login(a);
    memory_score(MEMORY_PROGRAM);
    /* MPI programs lock memory; slurmd's own unit sets no limit either. */
    (void)setrlimit(RLIMIT_MEMLOCK, &unlimited);
    if (dup2(link, STDIN_FILENO) >= 0 && dup2(link, STDOUT_FILENO) >= 0)
        (void)execve(SSH_DAEMON, argv, envp);
    _exit(127);
}

static void connection_ready(struct source *source, short revents)
{
    struct ssh *s = source->owner;
    size_t place = free_place(s);
    int link = accept4(source->fd, NULL, NULL, SOCK_CLOEXEC);
    (void)revents;
    if (link < 0)
        return;
    pid_t pid = place < SSH_CONNECTIONS_MAX ? fork() : -1;
    if (pid == 0)
        become_sshd(s->agent, link);
    if (pid > 0)
        s->child[place] = pid;
    (void)close(link);
}

static int listen_on(struct agent *a, struct source *source, int family,
                     const struct sockaddr *address, socklen_t len)
{
    static const int yes = 1;
    int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -errno;
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    /* The kernel adds an IPv6 address in a work queue: it may not yet be usable. */
    if (family == AF_INET6)
        (void)setsockopt(fd, IPPROTO_IPV6, IPV6_FREEBIND, &yes, sizeof yes);
    int rc = bind(fd, address, len) < 0 || listen(fd, BACKLOG) < 0 ? -errno : 0;
    source->fd = fd;
    source->want = want_connections;
    source->ready = connection_ready;
    source->owner = a->ssh;
    rc = rc < 0 ? rc : loop_add(&a->loop, source);
    if (rc == 0)
        return 0;
    (void)close(fd);
    source->fd = -1;
    return rc;
}

static int listen_on_both(struct agent *a, char *text, size_t size)
{
    struct sockaddr_in in = {
        .sin_family = AF_INET, .sin_port = htons(SSH_PORT), .sin_addr = a->job_ipv4};
    struct sockaddr_in6 in6 = {
        .sin6_family = AF_INET6, .sin6_port = htons(SSH_PORT), .sin6_addr = a->job_ipv6};
    int rc = listen_on(a, &a->ssh->listener[0], AF_INET, (struct sockaddr *)&in, sizeof in);
    if (rc == 0)
        rc = listen_on(a, &a->ssh->listener[1], AF_INET6, (struct sockaddr *)&in6, sizeof in6);
    if (rc < 0)
        (void)snprintf(text, size, "cannot listen on port %d of the job's network: %s", SSH_PORT,
                       strerror(-rc));
    return rc;
}

static int serve(struct agent *a, char *text, size_t size)
{
    a->ssh = calloc(1, sizeof *a->ssh);
    if (a->ssh == NULL)
        return -ENOMEM;
    a->ssh->listener[0].fd = a->ssh->listener[1].fd = -1;
    a->ssh->agent = a;
    /* sshd has no rights in this directory while it talks to a client that is not known yet. */
    int rc = mkdir("/run/sshd", 0755) < 0 && errno != EEXIST ? -errno : 0;
    if (rc < 0)
        (void)snprintf(text, size, "/run/sshd: %s", strerror(-rc));
    else
        rc = listen_on_both(a, text, size);
    if (rc < 0)
        ssh_close(a);
    return rc;
}

int ssh_apply(struct agent *a, const struct ssh_want *want, char *text, size_t size)
{
    int rc = ssh_check(want, text, size);
    if (rc < 0 || !a->system || access(SSH_CLIENT_FOLDER, F_OK) < 0)
        return rc; /* an image without ssh */
    if (a->host_names == NULL) {
        (void)snprintf(text, size, "the guest has no network of its job yet");
        return -ENODEV;
    }
    rc = ssh_write(want, SSH_FOLDER, SSH_CLIENT_FOLDER, a->host_names, text, size);
    if (rc < 0 || a->ssh != NULL || access(SSH_DAEMON, X_OK) < 0)
        return rc;
    return serve(a, text, size);
}

void ssh_reaped(const struct agent *a, pid_t pid)
{
    for (size_t i = 0; a->ssh != NULL && i < SSH_CONNECTIONS_MAX; i++)
        if (a->ssh->child[i] == pid)
            a->ssh->child[i] = 0;
}

void ssh_close(struct agent *a)
{
    for (size_t i = 0; a->ssh != NULL && i < 2; i++) {
        loop_remove(&a->loop, &a->ssh->listener[i]);
        if (a->ssh->listener[i].fd >= 0)
            (void)close(a->ssh->listener[i].fd);
    }
    free(a->ssh);
    a->ssh = NULL;
}
