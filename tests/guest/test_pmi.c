/* SPDX-License-Identifier: Apache-2.0 */
/* The process mapping for several guests on a node, and the stream in which it comes. */
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "mapping.h"
#include "pmi.h"
#include "pmi_filter.h"
#include "pmix.h"
#include "tlv.h"

enum { TASKS = 4096 };

/*
 * The node of each task, read from a mapping as MPICH reads it, written a second time: MPICH
 * (src/util/mpir_nodemap.h) takes the blocks one after another, and a node with each COUNT.
 */
static void nodes_of(const char *mapping, uint32_t tasks, uint32_t node[TASKS])
{
    const char *p = mapping + strlen("(vector");
    uint32_t task = 0;
    assert_int_equal(strncmp(mapping, "(vector,(", 9), 0);
    while (*p == ',') {
        unsigned long block[3];
        char *rest = NULL;
        assert_int_equal(p[1], '(');
        p++;
        for (int i = 0; i < 3; i++) {
            block[i] = strtoul(p + 1, &rest, 10);
            p = rest;
            assert_int_equal(*p, i < 2 ? ',' : ')');
        }
        p++;
        for (unsigned long i = 0; i < block[1]; i++)
            for (unsigned long k = 0; k < block[2]; k++) {
                assert_true(task < tasks);
                node[task++] = (uint32_t)(block[0] + i);
            }
    }
    assert_string_equal(p, ")");
    assert_int_equal(task, tasks);
}

/* A number below n, the same in each run. */
static uint32_t below(uint32_t n)
{
    static uint32_t state = 20;
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    return state % n;
}

static void divide_is(const char *old, uint32_t tasks, uint32_t guests, const char *expected)
{
    char out[MAPPING_TEXT_MAX + 1];
    assert_int_equal(mapping_divide(old, strlen(old), tasks, guests, out), 0);
    assert_string_equal(out, expected);
}

static void each_guest_is_a_node_of_the_mapping(void **state)
{
    (void)state;
    divide_is("(vector,(0,2,2))", 4, 2, "(vector,(0,4,1))");
    divide_is("(vector,(0,2,4))", 8, 2, "(vector,(0,4,2))");
    divide_is("(vector,(0,1,5))", 5, 2, "(vector,(0,1,3),(1,1,2))");
    /* fewer tasks than guests */
    divide_is("(vector,(0,3,1))", 3, 4, "(vector,(0,3,1))");
    divide_is("(vector,(0,1,2),(1,1,4))", 6, 3, "(vector,(0,2,1),(2,1,2),(3,2,1))");
    /* srun --distribution=cyclic: tasks 0 and 2 are the first node's */
    divide_is("(vector,(0,2,1),(0,2,1))", 4, 2, "(vector,(0,1,1),(2,1,1),(1,1,1),(3,1,1))");
    divide_is("(vector,(0,2,1),(0,2,1),(0,2,1),(0,2,1))", 8, 2,
              "(vector,(0,1,1),(2,1,1),(0,1,1),(2,1,1),(1,1,1),(3,1,1),(1,1,1),(3,1,1))");
    divide_is("(vector,(0,2,2))", 4, 1, "(vector,(0,2,2))");
}

/* Where the plugin puts a task: tests/spank/test_state.c has the same rule. */
/* promise: pmi.exchange */
static void every_task_shares_a_node_with_those_of_its_guest_only(void **state)
{
    (void)state;
    for (int round = 0; round < 2000; round++) {
        char text[8192] = "(vector", out[MAPPING_TEXT_MAX + 1];
        uint32_t count[8] = {0}, local[TASKS], node[TASKS], got[TASKS], tasks = 0;
        uint32_t nodes = 1 + below(8), guests = 1 + below(5);
        for (uint32_t n = 0; n < nodes || below(4) != 0; n++) {
            uint32_t at = n < nodes ? n : below(nodes), each = 1 + below(9);
            if (tasks + each > TASKS || strlen(text) > sizeof text - 64)
                break;
            (void)snprintf(text + strlen(text), 64, ",(%u,1,%u)", at, each);
            for (uint32_t k = 0; k < each; k++) {
                node[tasks] = at;
                local[tasks++] = count[at]++;
            }
        }
        (void)snprintf(text + strlen(text), 2, ")");
        assert_int_equal(mapping_divide(text, strlen(text), tasks, guests, out), 0);
        nodes_of(out, tasks, got);
        bool alone = strlen(out) < 32 && got[tasks - 1] == tasks - 1;
        for (uint32_t a = 0; a < tasks && !alone; a++)
            for (uint32_t b = a + 1; b < tasks; b++) {
                bool same = node[a] == node[b] && local[a] * guests / count[node[a]] ==
                                                      local[b] * guests / count[node[b]];
                assert_int_equal(got[a] == got[b], same);
            }
    }
}

static void what_is_no_mapping_of_the_step_separates_all_tasks(void **state)
{
    static const char *const wrong[] = {
        "",
        "(vector",
        "(vector)",
        "(vector,(0,2,2)",
        "(vector,(0,2,2))x",
        "(vector,(0,2,3))",
        "(vector,(0,2,1))",
        "(vector,(0,2,-2))",
        "(vector,(0,0,4))",
        "(vector,(4,1,4))",
        "(vector,(0,4,0),(0,1,4))",
        "(vector,(0,4294967295,4294967295))",
        "(vector,(0,99999999999999999999,4))",
        "(vector,(1,2147483649,2))",
        "(other,(0,2,2))",
        "(vector,(0,2,2), (0,2,2))",
    };
    (void)state;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        divide_is(wrong[i], 4, 2, "(vector,(0,4,1))");
}

static void a_mapping_that_would_be_too_long_separates_all_tasks(void **state)
{
    char text[8192] = "(vector";
    (void)state;
    /* three tasks on each of 300 nodes with two guests: blocks of two and one */
    divide_is("(vector,(0,300,3))", 900, 2, "(vector,(0,900,1))");
    for (int i = 0; i < 500; i++)
        (void)snprintf(text + strlen(text), 32, ",(%d,1,%d)", i, i % 2 == 0 ? 2 : 4);
    (void)snprintf(text + strlen(text), 2, ")");
    divide_is(text, 1500, 2, "(vector,(0,1500,1))");
}

/* --- the stream ---------------------------------------------------------------- */

/* Passes a stream in pieces of some size; returns what comes out. */
static char *filtered(const char *in, size_t len, size_t piece, uint32_t tasks, uint32_t guests)
{
    struct pmi_filter f = {.tasks = tasks, .guests = guests};
    struct buf out = {0};
    for (size_t at = 0; at < len; at += piece) {
        /* An exact copy, so that the sanitizer detects a read after its end. */
        size_t part = len - at < piece ? len - at : piece;
        uint8_t *copy = malloc(part);
        assert_non_null(copy);
        memcpy(copy, in + at, part);
        assert_int_equal(pmi_filter(&f, copy, part, &out), 0);
        free(copy);
    }
    assert_int_equal(pmi_filter_end(&f, &out), 0);
    char *text = strndup((const char *)buf_head(&out), out.len);
    assert_non_null(text);
    buf_free(&out);
    return text;
}

static void stream_is(const char *in, const char *expected)
{
    for (size_t piece = 1; piece <= strlen(in); piece++) {
        char *text = filtered(in, strlen(in), piece, 4, 2);
        assert_string_equal(text, expected);
        free(text);
    }
}

/* As slurmstepd 24.11 answers: src/plugins/mpi/pmi2/pmi1.c. */
static void lines_of_pmi_1_pass(void **state)
{
    (void)state;
    stream_is("cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1\n"
              "cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=1024\n"
              "cmd=get_result rc=0 value=(vector,(0,2,2))\n"
              "cmd=put_result rc=0\ncmd=barrier_out rc=0\n"
              "cmd=get_result rc=0 value=vector,(0,2,2)\n"
              "cmd=get_result rc=1\ncmd=finalize_ack rc=0\nrest",
              "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1\n"
              "cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=1024\n"
              "cmd=get_result rc=0 value=(vector,(0,4,1))\n"
              "cmd=put_result rc=0\ncmd=barrier_out rc=0\n"
              "cmd=get_result rc=0 value=vector,(0,2,2)\n"
              "cmd=get_result rc=1\ncmd=finalize_ack rc=0\nrest");
}

/* pmi2.c and client.c of the same: the length has six characters. */
static void messages_of_pmi_2_pass(void **state)
{
    (void)state;
    stream_is("cmd=response_to_init rc=0 pmi_version=2 pmi_subversion=0\n"
              "37    cmd=fullinit-response;rc=0;rank=1;x=;"
              "65    cmd=info-getjobattr-response;rc=0;found=TRUE;value=(vector,(0,1,4"
              "68    cmd=info-getjobattr-response;rc=0;found=TRUE;value=(vector,(0,1,4));"
              "0     "
              "21    cmd=kvs-put-response;",
              "cmd=response_to_init rc=0 pmi_version=2 pmi_subversion=0\n"
              "37    cmd=fullinit-response;rc=0;rank=1;x=;"
              "67    cmd=info-getjobattr-response;rc=0;found=TRUE;value=(vector,(0,4,1))"
              "68    cmd=info-getjobattr-response;rc=0;found=TRUE;value=(vector,(0,2,2));"
              "0     "
              "21    cmd=kvs-put-response;");
    /* the client is refused: what follows are lines */
    stream_is("cmd=response_to_init rc=1 pmi_version=2 pmi_subversion=0\n5     ab\n",
              "cmd=response_to_init rc=1 pmi_version=2 pmi_subversion=0\n5     ab\n");
    /* not a length */
    stream_is("cmd=response_to_init rc=0 pmi_version=2 pmi_subversion=0\n"
              "x12   ;value=(vector,(0,1,4));",
              "cmd=response_to_init rc=0 pmi_version=2 pmi_subversion=0\n"
              "x12   ;value=(vector,(0,1,4));");
}

/* A text with a long part in the middle, which looks like a mapping at its end. */
static char *with_long_part(const char *before, const char *after)
{
    static char part[100001];
    static const char mapping[] = ";value=(vector,(0,1,4)); value=(vector,";
    char *text = NULL;
    for (size_t i = 0; i < sizeof part - 1; i++)
        part[i] =
            i + sizeof mapping > sizeof part ? mapping[i + sizeof mapping - sizeof part] : 'y';
    assert_true(asprintf(&text, "%s%s%s", before, part, after) > 0);
    return text;
}

static void long_messages_pass_unread(void **state)
{
    static const char init[] = "cmd=response_to_init rc=0 pmi_version=2 pmi_subversion=0\n100000";
    static const char line[] = "\ncmd=get_result rc=0 value=(vector,(0,1,4))\n";
    static const char changed[] = "\ncmd=get_result rc=0 value=(vector,(0,2,2))\n";
    static const size_t pieces[] = {1, 7, 4096, 200000};
    char *in[] = {with_long_part("", line), with_long_part(init, "13    ;value=(vecto")};
    char *expected[] = {with_long_part("", changed), with_long_part(init, "13    ;value=(vecto")};
    (void)state;
    for (size_t k = 0; k < 2; k++) {
        for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++) {
            char *text = filtered(in[k], strlen(in[k]), pieces[i], 4, 2);
            assert_string_equal(text, expected[k]);
            free(text);
        }
        free(in[k]);
        free(expected[k]);
    }
}

/* --- PMIx ------------------------------------------------------------------------ */

static bool find(struct link_server *server, const char *const *envp)
{
    struct execspec spec = {0};
    for (; *envp != NULL; envp++)
        assert_int_equal(execspec_add_env(&spec, *envp), 0);
    bool found = pmix_find(&spec, server);
    execspec_free(&spec);
    return found;
}

static void the_server_is_where_all_variables_say(void **state)
{
    static const char *const v4[] = {"PMIX_SERVER_URI=s.1;tcp4://127.0.0.1:4711", "PMIX_RANK=1",
                                     "PMIX_SERVER_URI41=s.1;tcp4://127.0.0.1:4711", NULL};
    static const char *const v6[] = {"PMIX_SERVER_URI41=s;tcp6://[::1]:65535", NULL};
    struct link_server server;
    (void)state;
    assert_true(find(&server, v4));
    assert_int_equal(server.at.in.sin_family, AF_INET);
    assert_int_equal(ntohl(server.at.in.sin_addr.s_addr), 0x7f000001);
    assert_int_equal(ntohs(server.at.in.sin_port), 4711);
    assert_true(find(&server, v6));
    assert_int_equal(server.at.in6.sin6_family, AF_INET6);
    assert_memory_equal(&server.at.in6.sin6_addr, &in6addr_loopback, 16);
    assert_int_equal(ntohs(server.at.in6.sin6_port), 65535);
}

/* promise: attack.relay */
static void no_other_address_is_a_server(void **state)
{
    static const char *const wrong[] = {
        "x;tcp4://126.0.0.1:7",
        "x;tcp4://128.0.0.1:7",
        "x;tcp4://127.0.0.1",
        "x;tcp4://127.0.0.1:",
        "x;tcp4://127.0.0.1:0",
        "x;tcp4://127.0.0.1:65536",
        "x;tcp4://127.0.0.1:123456789012345678901",
        "x;tcp4://127.0.0.1:7;tcp4://10.0.0.1:7",
        "x;tcp4://127.0.0.1000000000000000000:7",
        "x;tcp4://localhost:7",
        "x;tcp6://[::2]:7",
        "x;tcp6://[::1]",
        "x;tcp4://",
        "tcp4://127.0.0.1:7",
        "",
    };
    static const char *const two[] = {"PMIX_SERVER_URI2=x;tcp4://127.0.0.1:7",
                                      "PMIX_SERVER_URI3=x;tcp4://127.0.0.1:8", NULL};
    static const char *const none[] = {"PMIX_SERVER_URI", "PMIX_RANK=0", NULL};
    struct link_server server;
    (void)state;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char entry[128];
        const char *const envp[] = {entry, NULL};
        (void)snprintf(entry, sizeof entry, "PMIX_SERVER_URI41=%s", wrong[i]);
        assert_false(find(&server, envp));
    }
    assert_false(find(&server, two));
    assert_false(find(&server, none));
}

/* --- emulated guests ---------------------------------------------------------------- */

/* Lines on stderr of a task of a step of 4 tasks on 2 nodes. */
static int lines_said(const char *const *envp, bool pmix, bool emulated)
{
    struct execspec spec = {.pmix = pmix};
    struct buf fields = {0};
    FILE *to = tmpfile();
    int saved = dup(STDERR_FILENO), lines = 0;
    assert_non_null(to);
    for (; *envp != NULL; envp++)
        assert_int_equal(execspec_add_env(&spec, *envp), 0);
    assert_int_equal(tlv_put_u32(&fields, TAG_PID, 7), 0);
    if (emulated)
        assert_int_equal(tlv_put_u32(&fields, TAG_EMULATED, 1), 0);
    struct frame started = {
        .type = VHPC_STARTED, .length = (uint32_t)fields.len, .payload = buf_head(&fields)};
    (void)dup2(fileno(to), STDERR_FILENO);
    pmi_say_emulated(&spec, &started);
    (void)fflush(stderr);
    (void)dup2(saved, STDERR_FILENO);
    (void)close(saved);
    rewind(to);
    for (int c; (c = fgetc(to)) != EOF;)
        lines += c == '\n';
    (void)fclose(to);
    buf_free(&fields);
    execspec_free(&spec);
    return lines;
}

#define STEP(id, rank, guests)                                                                     \
    ((const char *const[]){"SLURM_STEP_ID=" id, "SLURM_PROCID=" rank, "SLURM_STEP_NUM_TASKS=4",    \
                           "SLURM_STEP_NUM_NODES=2", "VHPC_JOB_GUESTS=" guests, NULL})

static void ranks_that_share_an_emulated_guest_are_told_once(void **state)
{
    (void)state;
    assert_int_equal(lines_said(STEP("0", "0", "1"), true, true), 1);
    assert_int_equal(lines_said(STEP("0", "0", "1"), true, false), 0);
    assert_int_equal(lines_said(STEP("0", "0", "1"), false, true), 0);
    assert_int_equal(lines_said(STEP("0", "1", "1"), true, true), 0);
    assert_int_equal(lines_said(STEP("1", "0", "1"), true, true), 0);
    assert_int_equal(lines_said(STEP("0", "0", "2"), true, true), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_that_share_an_emulated_guest_are_told_once),
        cmocka_unit_test(each_guest_is_a_node_of_the_mapping),
        cmocka_unit_test(every_task_shares_a_node_with_those_of_its_guest_only),
        cmocka_unit_test(what_is_no_mapping_of_the_step_separates_all_tasks),
        cmocka_unit_test(a_mapping_that_would_be_too_long_separates_all_tasks),
        cmocka_unit_test(lines_of_pmi_1_pass),
        cmocka_unit_test(messages_of_pmi_2_pass),
        cmocka_unit_test(long_messages_pass_unread),
        cmocka_unit_test(the_server_is_where_all_variables_say),
        cmocka_unit_test(no_other_address_is_a_server),
    };
    return cmocka_run_group_tests_name("pmi", tests, NULL, NULL);
}
