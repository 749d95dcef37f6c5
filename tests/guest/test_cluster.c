/* SPDX-License-Identifier: Apache-2.0 */
/* The cluster operation: what is refused, what is written, and what programs learn. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "cluster.h"
#include "hosts.h"
#include "protocol.h"
#include "textfile.h"

static char folder[64], inner[80], path[128];

static int setup(void **state)
{
    (void)state;
    (void)snprintf(folder, sizeof folder, "/tmp/vhpc-cluster-XXXXXX");
    if (mkdtemp(folder) == NULL)
        return -1;
    (void)snprintf(inner, sizeof inner, "%s/cluster", folder);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    return remove_folder(folder);
}

static const char *in(const char *name)
{
    (void)snprintf(path, sizeof path, "%s/%s", inner, name);
    return path;
}

struct sent {
    const char *name, *ipv4, *ipv6;
    uint32_t job, slots;
};

static const struct sent FIRST = {"n1-j1234", "10.200.0.1", "fd76:6870:6300::1", 1234, 4};
static const struct sent SECOND = {"n2-g0-j1300", "10.200.0.2", "fd76:6870:6300:0::2", 1300, 16};

static int add(struct cluster_want *want, const struct sent *guest)
{
    struct buf b = {0};
    int rc = tlv_put_str(&b, TAG_HOSTNAME, guest->name);
    rc = rc < 0 ? rc : tlv_put_u32(&b, TAG_JOB, guest->job);
    rc = rc < 0 ? rc : tlv_put_str(&b, TAG_IPV4, guest->ipv4);
    rc = rc < 0 ? rc : tlv_put_str(&b, TAG_IPV6, guest->ipv6);
    rc = rc < 0 ? rc : tlv_put_u32(&b, TAG_CPUS, guest->slots);
    assert_int_equal(rc, 0);
    const struct tlv t = {.tag = TAG_GUEST, .len = (uint32_t)b.len, .data = buf_head(&b)};
    rc = cluster_add_guest(want, &t);
    buf_free(&b);
    return rc;
}

static int add_key(struct cluster_keys *keys, const char *key)
{
    const struct tlv t = {.len = (uint32_t)strlen(key), .data = (const uint8_t *)key};
    return cluster_add_key(keys, "", &t);
}

static struct cluster_want good(void)
{
    struct cluster_want want = {.name = "phys.2/exam", .job = 1300, .uid = 2001};
    assert_int_equal(add(&want, &FIRST), 0);
    assert_int_equal(add(&want, &SECOND), 0);
    return want;
}

static void the_lists_have_a_line_for_each_guest(void **state)
{
    struct agent a = {.cluster_folder = inner};
    struct cluster_want want = good();
    struct stat st;
    char text[256] = "";
    (void)state;
    assert_int_equal(cluster_apply(&a, &want, text, sizeof text), 0);
    expect_text(in("hostfile"), "n1-j1234 slots=4\nn2-g0-j1300 slots=16\n");
    expect_text(in("machinefile"), "n1-j1234:4\nn2-g0-j1300:16\n");
    expect_text(in("hosts"), "n1-j1234\nn2-g0-j1300\n");
    expect_text(in("members"),
                "{\"host\": \"n1-j1234\", \"job\": 1234, \"ipv4\": \"10.200.0.1\", "
                "\"ipv6\": \"fd76:6870:6300::1\", \"slots\": 4}\n"
                "{\"host\": \"n2-g0-j1300\", \"job\": 1300, \"ipv4\": \"10.200.0.2\", "
                "\"ipv6\": \"fd76:6870:6300::2\", \"slots\": 16}\n");
    assert_string_equal(cluster_hosts(&a),
                        "10.200.0.1 n1-j1234\nfd76:6870:6300::1 n1-j1234\n"
                        "10.200.0.2 n2-g0-j1300\nfd76:6870:6300::2 n2-g0-j1300\n");
    assert_int_equal(stat(inner, &st), 0);
    assert_int_equal(st.st_mode & 07777, 0755);
    cluster_free(&want);
    want = (struct cluster_want){.name = "exam", .job = 1300, .uid = 2001};
    assert_int_equal(add(&want, &SECOND), 0); /* the first one has left */
    assert_int_equal(cluster_apply(&a, &want, text, sizeof text), 0);
    expect_text(in("hostfile"), "n2-g0-j1300 slots=16\n");
    cluster_free(&want);
    cluster_forget(&a);
}

static void what_is_no_guest_is_refused(void **state)
{
    struct sent wrong[] = {FIRST, FIRST, FIRST, FIRST, FIRST, FIRST, FIRST, FIRST, FIRST, FIRST};
    struct cluster_want want = {0};
    (void)state;
    wrong[0].name = "";
    wrong[1].name = "-n1";
    wrong[2].name = "n1\", \"job";
    wrong[3].ipv4 = "10.200.0";
    wrong[4].ipv4 = "10.200.0.1/16";
    wrong[5].ipv6 = "10.200.0.1";
    wrong[6].ipv6 = "";
    wrong[7].job = 0;
    wrong[8].slots = 0;
    wrong[9].slots = 65537;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        assert_int_equal(add(&want, &wrong[i]), -EPROTO);
    static const uint8_t cut[] = {50, 0, 0, 0, 9, 0, 0, 0, 'n'};
    const struct tlv t = {.tag = TAG_GUEST, .len = sizeof cut, .data = cut};
    assert_int_equal(cluster_add_guest(&want, &t), -EPROTO);
    assert_int_equal(want.count, 0);
    assert_int_equal(want.names.len + want.members.len, 0);
    want.count = CLUSTER_GUESTS_MAX;
    assert_int_equal(add(&want, &FIRST), -EPROTO);
    cluster_free(&want);
}

static void what_is_no_key_is_refused(void **state)
{
    static const char *const wrong[] = {"", "#", "@revoked", "ssh-ed25519 A\nssh-ed25519 B",
                                        "ssh-\xc3\xa9"};
    struct cluster_keys keys = {0};
    char longest[1026];
    (void)state;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        assert_int_equal(add_key(&keys, wrong[i]), -EPROTO);
    memset(longest, 'a', sizeof longest);
    longest[1025] = '\0';
    assert_int_equal(add_key(&keys, longest), -EPROTO);
    longest[1024] = '\0';
    assert_int_equal(add_key(&keys, longest), 0);
    keys.count = CLUSTER_GUESTS_MAX;
    assert_int_equal(add_key(&keys, "ssh-ed25519 A"), -EPROTO);
    buf_free(&keys.lines);
}

static void a_refused_request_changes_nothing(void **state)
{
    static const char *const names[] = {"",         "-exam", "ex.am", "ex am", "_exam",
                                        "a/b/exam", "a/",    "/exam", "a/-b",  "a/ex.am"};
    struct agent a = {.cluster_folder = inner};
    struct cluster_want want = good();
    char text[256] = "";
    (void)state;
    assert_int_equal(cluster_apply(&a, &want, text, sizeof text), 0);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        (void)snprintf(want.name, sizeof want.name, "%s", names[i]);
        assert_int_equal(cluster_apply(&a, &want, text, sizeof text), -EINVAL);
        assert_non_null(strstr(text, "CLUSTER"));
    }
    cluster_free(&want);
    want = (struct cluster_want){.name = "exam", .job = 1300, .uid = 2001};
    assert_int_equal(cluster_apply(&a, &want, text, sizeof text), -EINVAL);
    assert_int_equal(add(&want, &SECOND), 0);
    want.uid = 0;
    assert_int_equal(add_key(&want.user_keys, "ssh-ed25519 A"), 0);
    assert_int_equal(cluster_apply(&a, &want, text, sizeof text), -EINVAL);
    want.uid = 2001;
    want.job = 0;
    assert_int_equal(cluster_apply(&a, &want, text, sizeof text), -EINVAL);
    expect_text(in("hostfile"), "n1-j1234 slots=4\nn2-g0-j1300 slots=16\n");
    a.cluster_folder = "/nonexistent/cluster";
    want.job = 1300;
    assert_int_equal(cluster_apply(&a, &want, text, sizeof text), -ENOENT);
    assert_non_null(strstr(cluster_hosts(&a), "n1-j1234"));
    cluster_free(&want);
    cluster_forget(&a);
}

static void programs_learn_their_cluster(void **state)
{
    struct agent a = {.cluster_folder = "/run/vhpc/cluster"};
    struct execspec spec = {0};
    struct cluster_want want = good();
    char text[256] = "";
    (void)state;
    assert_int_equal(execspec_add_env(&spec, "VHPC_CLUSTER_NAME=of-another-job"), 0);
    assert_int_equal(cluster_environment(&a, &spec), 0);
    assert_int_equal(spec.envc, 0);
    a.cluster_folder = inner;
    assert_int_equal(cluster_apply(&a, &want, text, sizeof text), 0);
    a.cluster_folder = "/run/vhpc/cluster";
    assert_int_equal(cluster_environment(&a, &spec), 0);
    assert_int_equal(cluster_environment(&a, &spec), 0);
    assert_int_equal(spec.envc, 4);
    assert_string_equal(execspec_getenv(&spec, "VHPC_CLUSTER_NAME"), "phys.2/exam");
    assert_string_equal(execspec_getenv(&spec, "VHPC_CLUSTER_JOB"), "1300");
    assert_string_equal(execspec_getenv(&spec, "VHPC_CLUSTER_HOSTFILE"),
                        "/run/vhpc/cluster/hostfile");
    assert_string_equal(execspec_getenv(&spec, "VHPC_CLUSTER_MACHINEFILE"),
                        "/run/vhpc/cluster/machinefile");
    execspec_free(&spec);
    cluster_free(&want);
    cluster_forget(&a);
}

static void other_lines_of_the_hosts_file_stay(void **state)
{
    char hosts[96];
    struct buf lines = {0};
    (void)state;
    (void)snprintf(hosts, sizeof hosts, "%s/hosts", folder);
    assert_int_equal(buf_append(&lines, "127.0.0.1 localhost\n", 20), 0);
    assert_int_equal(hosts_write(hosts, &lines, ""), 0);
    expect_text(hosts, "127.0.0.1 localhost\n");
    assert_int_equal(hosts_put_block(hosts, "10.200.0.1 n1-j1\n"), 0);
    expect_text(hosts, "127.0.0.1 localhost\n# guests of the cluster\n10.200.0.1 n1-j1\n"
                       "# end of the cluster\n");
    /* a user adds one */
    put_text(hosts, "127.0.0.1 localhost\n# guests of the cluster\n10.200.0.1 n1-j1\n"
                    "# end of the cluster\n192.0.2.1 own");
    assert_int_equal(hosts_put_block(hosts, "10.200.0.2 n2-j2\n"), 0);
    expect_text(hosts, "127.0.0.1 localhost\n192.0.2.1 own\n# guests of the cluster\n"
                       "10.200.0.2 n2-j2\n# end of the cluster\n");
    assert_int_equal(hosts_put_block(hosts, ""), 0);
    expect_text(hosts, "127.0.0.1 localhost\n192.0.2.1 own\n");
    assert_int_equal(unlink(hosts), 0);
    assert_int_equal(hosts_put_block(hosts, "10.200.0.2 n2-j2\n"), 0);
    expect_text(hosts, "# guests of the cluster\n10.200.0.2 n2-j2\n# end of the cluster\n");
    assert_int_equal(unlink(hosts), 0);
    assert_int_equal(mkfifo(hosts, 0600), 0);
    assert_int_equal(hosts_put_block(hosts, "10.200.0.2 n2-j2\n"), -EINVAL);
    buf_free(&lines);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(the_lists_have_a_line_for_each_guest, setup, teardown),
        cmocka_unit_test(what_is_no_guest_is_refused),
        cmocka_unit_test(what_is_no_key_is_refused),
        cmocka_unit_test_setup_teardown(a_refused_request_changes_nothing, setup, teardown),
        cmocka_unit_test_setup_teardown(programs_learn_their_cluster, setup, teardown),
        cmocka_unit_test_setup_teardown(other_lines_of_the_hosts_file_stay, setup, teardown),
    };
    return cmocka_run_group_tests_name("the guest's cluster", tests, NULL, NULL);
}
