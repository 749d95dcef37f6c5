/* SPDX-License-Identifier: Apache-2.0 */
/* EXEC: what is encoded is what is decoded, and malformed messages are refused. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "execspec.h"
#include "tlv.h"

static struct execspec sample(void)
{
    struct execspec s = {.uid = 2001, .gid = 100, .umask = 027, .has_umask = true};
    s.fd_dir[0] = VHPC_FD_IN;
    s.fd_dir[1] = s.fd_dir[2] = VHPC_FD_OUT;
    s.fd_dir[5] = VHPC_FD_BOTH;
    for (int i = 0; i < 100; i++) {
        char text[32];
        (void)snprintf(text, sizeof text, "arg %d", i);
        assert_int_equal(execspec_add_arg(&s, text), 0);
    }
    assert_int_equal(execspec_add_env(&s, "PATH=/bin"), 0);
    assert_int_equal(execspec_add_env(&s, "EMPTY="), 0);
    s.cwd = strdup("/home/alice");
    s.groups = calloc(2, sizeof *s.groups);
    s.groups[0] = 100;
    s.groups[1] = 4000000000u;
    s.group_count = 2;
    s.rlimit[0] = (struct exec_rlimit){.resource = 7, .soft = 1024, .hard = UINT64_MAX};
    s.rlimit_count = 1;
    s.joined = true;
    s.has_nice = true;
    s.nice = -5;
    s.tty = true;
    s.winsize = (struct winsize){.ws_row = 24, .ws_col = 80};
    s.script_path = strdup("/var/spool/slurmd/job00042/slurm_script");
    s.script = malloc(11);
    memcpy(s.script, "#!/bin/sh\n\0", 11);
    s.script_len = 11;
    s.operand = 99;
    s.affinity[0] = 0x81;
    s.affinity[1] = 2;
    s.affinity_len = 2;
    s.pmi_refusal = strdup("no PMI here");
    s.pmi_network = true;
    s.pmix = true;
    s.x11 = (struct x11_display){.wanted = true, .number = 25, .cookie = {0xde, 0xad}};
    return s;
}

static void everything_survives_the_wire(void **state)
{
    (void)state;
    struct execspec s = sample(), back;
    struct buf b = {0};
    assert_int_equal(execspec_encode(&s, &b), 0);
    assert_int_equal(execspec_decode(buf_head(&b), b.len, &back), 0);
    assert_memory_equal(back.fd_dir, s.fd_dir, sizeof s.fd_dir);
    assert_true(back.joined);
    assert_int_equal(back.uid, 2001);
    assert_int_equal(back.gid, 100);
    assert_int_equal(back.argc, 100);
    assert_string_equal(back.argv[99], "arg 99");
    assert_null(back.argv[100]);
    assert_string_equal(execspec_getenv(&back, "PATH"), "/bin");
    assert_string_equal(execspec_getenv(&back, "EMPTY"), "");
    assert_null(execspec_getenv(&back, "PAT"));
    assert_string_equal(back.cwd, "/home/alice");
    assert_int_equal(back.group_count, 2);
    assert_int_equal(back.groups[1], 4000000000u);
    assert_int_equal(back.umask, 027);
    assert_int_equal(back.rlimit[0].resource, 7);
    assert_true(back.rlimit[0].hard == UINT64_MAX);
    assert_int_equal(back.nice, -5);
    assert_true(back.tty);
    assert_int_equal(back.winsize.ws_col, 80);
    assert_string_equal(back.pmi_refusal, "no PMI here");
    assert_true(back.pmi_network && back.pmix);
    assert_memory_equal(&back.x11, &s.x11, sizeof s.x11);
    assert_int_equal(back.operand, 99);
    assert_int_equal(back.affinity_len, 2);
    assert_memory_equal(back.affinity, "\x81\x02", 2);
    assert_int_equal(back.script_len, 11);
    assert_memory_equal(back.script, "#!/bin/sh\n\0", 11);
    buf_free(&b);
    execspec_free(&s);
    execspec_free(&back);
}

static void a_second_uid_cannot_replace_the_first(void **state)
{
    (void)state;
    struct execspec s = sample(), back;
    struct buf b = {0};
    assert_int_equal(execspec_encode(&s, &b), 0);
    assert_int_equal(tlv_put_u32(&b, TAG_UID, 0), 0);
    assert_int_equal(execspec_decode(buf_head(&b), b.len, &back), -EPROTO);
    assert_null(back.argv);
    buf_free(&b);
    execspec_free(&s);
}

static void a_display_has_a_port_and_comes_once(void **state)
{
    uint8_t raw[21] = {0xb7, 0xe8}; /* 59575: port 65575 */
    struct buf b = {0};
    struct execspec s = sample(), back;
    (void)state;
    assert_int_equal(execspec_encode(&s, &b), 0);
    assert_int_equal(tlv_put(&b, TAG_DISPLAY, "\x19\0\0\0................", 20), 0);
    assert_int_equal(execspec_decode(buf_head(&b), b.len, &back), -EPROTO);
    buf_free(&b);
    s.x11.wanted = false;
    for (size_t len = 19; len <= sizeof raw; len++) {
        assert_int_equal(execspec_encode(&s, &b), 0);
        assert_int_equal(tlv_put(&b, TAG_DISPLAY, raw, len), 0);
        assert_int_equal(execspec_decode(buf_head(&b), b.len, &back), -EPROTO);
        buf_free(&b);
    }
    execspec_free(&s);
}

static void one_refusal_of_pmi_is_enough(void **state)
{
    (void)state;
    struct execspec s = sample(), back;
    struct buf b = {0};
    assert_int_equal(execspec_encode(&s, &b), 0);
    assert_int_equal(tlv_put_str(&b, TAG_PMI_REFUSAL, "again"), 0);
    assert_int_equal(execspec_decode(buf_head(&b), b.len, &back), -EPROTO);
    buf_free(&b);
    execspec_free(&s);
}

/* promise: attack.host-command */
static void an_operand_is_an_argument(void **state)
{
    (void)state;
    struct execspec s = sample(), back;
    struct buf b = {0};
    s.operand = 100;
    assert_int_equal(execspec_encode(&s, &b), 0);
    assert_int_equal(execspec_decode(buf_head(&b), b.len, &back), -EPROTO);
    assert_int_equal(tlv_put_str(&b, TAG_ARG, "one more"), 0);
    assert_int_equal(execspec_decode(buf_head(&b), b.len, &back), 0);
    execspec_free(&back);
    assert_int_equal(tlv_put_u32(&b, TAG_OPERAND, 1), 0);
    assert_int_equal(execspec_decode(buf_head(&b), b.len, &back), -EPROTO);
    buf_free(&b);
    execspec_free(&s);
}

static void an_argument_is_inserted_in_its_place(void **state)
{
    static const char *const expected[] = {"a", "new", "b", "last"};
    (void)state;
    struct execspec s = {0};
    assert_int_equal(execspec_insert_arg(&s, 0, "b"), 0);
    assert_int_equal(execspec_insert_arg(&s, 0, "a"), 0);
    assert_int_equal(execspec_insert_arg(&s, 1, "new"), 0);
    assert_int_equal(execspec_insert_arg(&s, 3, "last"), 0);
    for (int i = 0; i < 4; i++)
        assert_string_equal(s.argv[i], expected[i]);
    assert_null(s.argv[4]);
    execspec_free(&s);
}

static void what_must_be_there_is_missed(void **state)
{
    (void)state;
    struct execspec back;
    struct buf b = {0};
    assert_int_equal(execspec_decode((const uint8_t *)"", 0, &back), -EPROTO);
    (void)tlv_put(&b, TAG_FDS, "", 0);
    (void)tlv_put_u32(&b, TAG_UID, 1);
    (void)tlv_put_u32(&b, TAG_GID, 1);
    assert_int_equal(execspec_decode(buf_head(&b), b.len, &back), -EPROTO); /* no argv */
    (void)tlv_put_str(&b, TAG_ARG, "x");
    assert_int_equal(execspec_decode(buf_head(&b), b.len, &back), 0);
    execspec_free(&back);
    (void)tlv_put_str(&b, TAG_SCRIPT_PATH, "/x");
    assert_int_equal(execspec_decode(buf_head(&b), b.len, &back), -EPROTO); /* without data */
    buf_free(&b);
}

static void every_truncation_is_refused_or_whole(void **state)
{
    (void)state;
    struct execspec s = sample(), back;
    struct buf b = {0};
    assert_int_equal(execspec_encode(&s, &b), 0);
    for (size_t len = 0; len < b.len; len++) {
        uint8_t *exact = malloc(len + 1);
        memcpy(exact, buf_head(&b), len);
        if (execspec_decode(exact, len, &back) == 0)
            execspec_free(&back);
        free(exact);
    }
    buf_free(&b);
    execspec_free(&s);
}

static void own_variables_do_not_go_into_the_guest(void **state)
{
    (void)state;
    struct execspec s = {0};
    (void)execspec_add_env(&s, "VHPC_RUN_SOCKET=/x");
    (void)execspec_add_env(&s, "HOME=/h");
    (void)execspec_add_env(&s, "VHPC_RUN_ARGV0=y");
    execspec_drop_env(&s, "VHPC_RUN_");
    assert_int_equal(s.envc, 1);
    assert_string_equal(s.envp[0], "HOME=/h");
    assert_null(s.envp[1]);
    execspec_free(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(everything_survives_the_wire),
        cmocka_unit_test(a_second_uid_cannot_replace_the_first),
        cmocka_unit_test(a_display_has_a_port_and_comes_once),
        cmocka_unit_test(one_refusal_of_pmi_is_enough),
        cmocka_unit_test(an_operand_is_an_argument),
        cmocka_unit_test(an_argument_is_inserted_in_its_place),
        cmocka_unit_test(what_must_be_there_is_missed),
        cmocka_unit_test(every_truncation_is_refused_or_whole),
        cmocka_unit_test(own_variables_do_not_go_into_the_guest),
    };
    return cmocka_run_group_tests_name("execspec", tests, NULL, NULL);
}
