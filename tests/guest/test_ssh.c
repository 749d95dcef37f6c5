/* SPDX-License-Identifier: Apache-2.0 */
/* promise: net.ssh */
/* The ssh operation and the files for mpirun: what is refused, and what is written. */
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "frame.h"
#include "hostfile.h"
#include "ssh.h"

#define HEAD "-----BEGIN OPENSSH PRIVATE KEY-----\n"

static struct ssh_want good(void)
{
    return (struct ssh_want){.host_key = (char *)HEAD "HOST\n",
                             .host_public = (char *)"ssh-ed25519 AAAAhost",
                             .user_key = (char *)HEAD "USER\n",
                             .user_public = (char *)"ssh-ed25519 AAAAuser",
                             .uid = 2001,
                             .gid = 2002};
}

static void expect_refusal(const struct ssh_want *want, const char *says)
{
    char text[256] = "";
    assert_int_equal(ssh_check(want, text, sizeof text), -EINVAL);
    assert_non_null(strstr(text, says));
}

static void what_is_no_key_is_refused(void **state)
{
    static const char *const no_key[] = {"", "KEY", "-----BEGIN RSA PRIVATE KEY-----\nA\n",
                                         HEAD "\x01\n", HEAD "\xc3\xa9\n"};
    static const char *const no_line[] = {"", "ssh-ed25519 A\nssh-ed25519 B", "\t"};
    char text[256] = "";
    (void)state;
    struct ssh_want want = good();
    assert_int_equal(ssh_check(&want, text, sizeof text), 0);
    for (size_t i = 0; i < sizeof no_key / sizeof *no_key; i++) {
        want = good();
        want.host_key = (char *)no_key[i];
        expect_refusal(&want, "private key");
        want = good();
        want.user_key = (char *)no_key[i];
        expect_refusal(&want, "private key");
    }
    for (size_t i = 0; i < sizeof no_line / sizeof *no_line; i++) {
        want = good();
        want.host_public = (char *)no_line[i];
        expect_refusal(&want, "not a line");
        want = good();
        want.user_public = (char *)no_line[i];
        expect_refusal(&want, "not a line");
    }
    want = good();
    want.user_key = NULL;
    expect_refusal(&want, "private key");
    want = good();
    want.uid = 0;
    expect_refusal(&want, "USER_UID");
}

static void read_file(const char *folder, const char *name, char *content, size_t size)
{
    char path[512];
    (void)snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    content[fread(content, 1, size - 1, file)] = '\0';
    (void)fclose(file);
}

static mode_t mode_of(const char *folder, const char *name)
{
    char path[512];
    struct stat st;
    (void)snprintf(path, sizeof path, "%s/%s", folder, name);
    assert_int_equal(lstat(path, &st), 0);
    return st.st_mode & 07777;
}

static void remove_all(const char *folder)
{
    char path[512];
    DIR *dir = opendir(folder);
    assert_non_null(dir);
    for (const struct dirent *e; (e = readdir(dir)) != NULL;) {
        (void)snprintf(path, sizeof path, "%s/%s", folder, e->d_name);
        (void)unlink(path);
    }
    (void)closedir(dir);
    assert_int_equal(rmdir(folder), 0);
}

static void private_keys_are_readable_by_their_owner_only(void **state)
{
    char base[] = "/tmp/vhpc-ssh-XXXXXX", folder[64], client[80], content[4096], text[256] = "";
    struct ssh_want want = good();
    (void)state;
    want.uid = getuid() != 0 ? getuid() : want.uid;
    want.gid = getuid() != 0 ? getgid() : want.gid;
    assert_non_null(mkdtemp(base));
    (void)snprintf(folder, sizeof folder, "%s/ssh", base);
    (void)snprintf(client, sizeof client, "%s/ssh_config.d", base);
    for (int i = 0; i < 2; i++) /* it can be repeated */
        assert_int_equal(ssh_write(&want, folder, base, "n1 n2", text, sizeof text), 0);
    assert_int_equal(mode_of(folder, "host_key"), 0600);
    assert_int_equal(mode_of(folder, "id_ed25519"), 0600);
    read_file(folder, "id_ed25519", content, sizeof content);
    assert_string_equal(content, HEAD "USER\n");
    read_file(folder, "host_key", content, sizeof content);
    assert_string_equal(content, HEAD "HOST\n");
    read_file(folder, "known_hosts", content, sizeof content);
    assert_string_equal(content, "vhpc-guest ssh-ed25519 AAAAhost\n");
    (void)snprintf(text, sizeof text, "authorized_keys-%u", want.uid);
    read_file(folder, text, content, sizeof content);
    assert_string_equal(content, "ssh-ed25519 AAAAuser\n");
    read_file(folder, "sshd_config", content, sizeof content);
    assert_non_null(strstr(content, "/ssh/authorized_keys-%U "));
    assert_non_null(strstr(content, "/ssh/cluster_keys-%U\n"));
    assert_non_null(strstr(content, "\nPermitRootLogin no\n"));
    read_file(client, "vhpc.conf", content, sizeof content);
    assert_int_equal(strncmp(content, "Host n1 n2\n", 11), 0);
    assert_non_null(strstr(content, "\n    ServerAliveInterval 1\n    ServerAliveCountMax 5\n"));
    remove_all(client);
    remove_all(folder);
    assert_int_equal(rmdir(base), 0);
}

static void members_that_have_left_lose_their_keys(void **state)
{
    char base[] = "/tmp/vhpc-ssh-XXXXXX", folder[64], client[80], content[4096], text[256] = "";
    const struct ssh_cluster both = {.names = "n1-j1 n2-j2",
                                     .known =
                                         "vhpc-guest ssh-ed25519 H1\nvhpc-guest ssh-ed25519 H2\n",
                                     .keys = "ssh-ed25519 U1\nssh-ed25519 U2\n",
                                     .uid = 2001};
    const struct ssh_cluster one = {.names = "n2-j2",
                                    .known = "vhpc-guest ssh-ed25519 H2\n",
                                    .keys = "ssh-ed25519 U2\n",
                                    .uid = 2001};
    (void)state;
    assert_non_null(mkdtemp(base));
    (void)snprintf(folder, sizeof folder, "%s/ssh", base);
    (void)snprintf(client, sizeof client, "%s/ssh_config.d", base);
    assert_int_equal(ssh_write_cluster(&both, folder, base, text, sizeof text), 0);
    read_file(folder, "cluster_known_hosts", content, sizeof content);
    assert_string_equal(content, both.known);
    read_file(folder, "cluster_keys-2001", content, sizeof content);
    assert_string_equal(content, both.keys);
    read_file(client, "vhpc-cluster.conf", content, sizeof content);
    assert_int_equal(strncmp(content, "Host n1-j1 n2-j2\n", 17), 0);
    (void)snprintf(text, sizeof text, "UserKnownHostsFile %s/known_hosts %s/cluster_known_hosts\n",
                   folder, folder);
    assert_non_null(strstr(content, text));
    assert_int_equal(ssh_write_cluster(&one, folder, base, text, sizeof text), 0);
    read_file(folder, "cluster_known_hosts", content, sizeof content);
    assert_string_equal(content, one.known);
    read_file(folder, "cluster_keys-2001", content, sizeof content);
    assert_string_equal(content, one.keys);
    read_file(client, "vhpc-cluster.conf", content, sizeof content);
    assert_int_equal(strncmp(content, "Host n2-j2\n", 11), 0);
    remove_all(client);
    remove_all(folder);
    assert_int_equal(rmdir(base), 0);
}

static int add(struct hostfile *h, uint32_t slots, const char *name)
{
    uint8_t data[400];
    size_t len = strlen(name);
    put_le32(data, slots);
    for (size_t i = 0; i < len; i++)
        data[4 + i] = (uint8_t)name[i];
    const struct tlv t = {.tag = TAG_HOST, .len = (uint32_t)(4 + len), .data = data};
    return hostfile_add(h, &t);
}

static void both_files_have_a_line_for_each_guest(void **state)
{
    char folder[] = "/tmp/vhpc-hosts-XXXXXX", slots[64], machines[64], content[256], text[256] = "";
    struct hostfile h = {0};
    (void)state;
    assert_int_equal(add(&h, 4, "n1"), 0);
    assert_int_equal(add(&h, 16, "n2-g0.cluster"), 0);
    assert_non_null(mkdtemp(folder));
    (void)snprintf(slots, sizeof slots, "%s/hostfile", folder);
    (void)snprintf(machines, sizeof machines, "%s/machinefile", folder);
    assert_int_equal(hostfile_write(&h, slots, machines, text, sizeof text), 0);
    read_file(folder, "hostfile", content, sizeof content);
    assert_string_equal(content, "n1 slots=4\nn2-g0.cluster slots=16\n");
    read_file(folder, "machinefile", content, sizeof content);
    assert_string_equal(content, "n1:4\nn2-g0.cluster:16\n");
    hostfile_free(&h);
    remove_all(folder);
}

static void what_is_no_host_is_refused(void **state)
{
    static const char *const no_name[] = {"", "-n1", "n 1", "n1\n", "n1,n2", "n1:4", "*", "!n1"};
    char longest[HOSTFILE_NAME_MAX + 2];
    struct hostfile h = {0};
    (void)state;
    for (size_t i = 0; i < sizeof no_name / sizeof *no_name; i++)
        assert_int_equal(add(&h, 1, no_name[i]), -EPROTO);
    assert_int_equal(add(&h, 0, "n1"), -EPROTO);
    assert_int_equal(add(&h, HOSTFILE_SLOTS_MAX + 1, "n1"), -EPROTO);
    memset(longest, 'n', sizeof longest);
    longest[HOSTFILE_NAME_MAX + 1] = '\0';
    assert_int_equal(add(&h, 1, longest), -EPROTO);
    longest[HOSTFILE_NAME_MAX] = '\0';
    assert_int_equal(add(&h, 1, longest), 0);
    h.count = HOSTFILE_HOSTS_MAX;
    assert_int_equal(add(&h, 1, "n1"), -EPROTO);
    hostfile_free(&h);
}

static void programs_learn_where_the_files_are(void **state)
{
    struct agent a = {.system = false};
    struct execspec spec = {0};
    struct hostfile h = {0};
    char text[256] = "";
    (void)state;
    assert_int_equal(hostfile_apply(&a, &h, text, sizeof text), 0);
    assert_int_equal(hostfile_environment(&a, &spec), 0);
    assert_int_equal(spec.envc, 0);
    assert_int_equal(add(&h, 4, "n1"), 0);
    assert_int_equal(add(&h, 4, "n2"), 0);
    assert_int_equal(hostfile_apply(&a, &h, text, sizeof text), 0);
    assert_string_equal(a.host_names, "n1 n2");
    assert_int_equal(hostfile_environment(&a, &spec), 0);
    assert_string_equal(execspec_getenv(&spec, "VHPC_HOSTFILE"), "/run/vhpc/hostfile");
    assert_string_equal(execspec_getenv(&spec, "VHPC_MACHINEFILE"), "/run/vhpc/machinefile");
    hostfile_free(&h);
    execspec_free(&spec);
    free(a.host_names);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_no_key_is_refused),
        cmocka_unit_test(private_keys_are_readable_by_their_owner_only),
        cmocka_unit_test(members_that_have_left_lose_their_keys),
        cmocka_unit_test(both_files_have_a_line_for_each_guest),
        cmocka_unit_test(what_is_no_host_is_refused),
        cmocka_unit_test(programs_learn_where_the_files_are),
    };
    return cmocka_run_group_tests_name("ssh and mpirun between guests", tests, NULL, NULL);
}
