/* SPDX-License-Identifier: Apache-2.0 */
/* Figures from the files of a cgroup, the table of steps, and the reply. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "accounting.h"
#include "agent.h"
#include "check.h"
#include "memory.h"
#include "tlv.h"

static char dir[64];

static const char *const files[] = {"cpu.stat", "memory.peak", "memory.events", "io.stat"};

static int setup(void **state)
{
    (void)state;
    (void)snprintf(dir, sizeof dir, "/tmp/vhpc-test-XXXXXX");
    return mkdtemp(dir) == NULL ? -1 : 0;
}

static int teardown(void **state)
{
    char path[128];
    (void)state;
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        (void)snprintf(path, sizeof path, "%s/%s", dir, files[i]);
        (void)unlink(path);
        (void)snprintf(path, sizeof path, "%s/s7/%s", dir, files[i]);
        (void)unlink(path);
        (void)snprintf(path, sizeof path, "%s/s8/%s", dir, files[i]);
        (void)unlink(path);
    }
    (void)snprintf(path, sizeof path, "%s/s7", dir);
    (void)rmdir(path);
    (void)snprintf(path, sizeof path, "%s/s8", dir);
    (void)rmdir(path);
    return rmdir(dir);
}

static void put_file(const char *name, const char *text)
{
    char path[128];
    (void)snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "we");
    assert_non_null(f);
    assert_true(fputs(text, f) >= 0);
    assert_int_equal(fclose(f), 0);
}

/* As Linux 6.12 writes them. */
static const char cpu_stat[] = "usage_usec 3071234\nuser_usec 2900000\nsystem_usec 171234\n"
                               "nice_usec 0\ncore_sched.force_idle_usec 0\n";
static const char memory_events[] =
    "low 0\nhigh 0\nmax 0\noom 3\noom_kill 2\noom_group_kill 1\nsock_throttled 0\n";
static const char io_stat[] =
    "254:16 rbytes=4096 wbytes=0 rios=1 wios=0 dbytes=0 dios=0\n"
    "254:0 rbytes=1000000 wbytes=512 rios=12 wios=1 dbytes=77 dios=1\n254:32 \n";

static void the_figures_are_those_of_the_kernel(void **state)
{
    struct usage u;
    (void)state;
    put_file("cpu.stat", cpu_stat);
    put_file("memory.peak", "104857600\n");
    put_file("memory.events", memory_events);
    put_file("io.stat", io_stat);
    usage_read(dir, &u);
    assert_int_equal(u.has, (1u << USAGE_FIGURES) - 1 - (1u << USAGE_RSS));
    assert_int_equal(u.value[USAGE_CPU], 3071234);
    assert_int_equal(u.value[USAGE_USER], 2900000);
    assert_int_equal(u.value[USAGE_SYSTEM], 171234);
    assert_int_equal(u.value[USAGE_PEAK], 104857600);
    assert_int_equal(u.value[USAGE_OOM], 2);
    assert_int_equal(u.value[USAGE_READ], 1004096);
    assert_int_equal(u.value[USAGE_WRITTEN], 512);
}

static void a_figure_that_the_kernel_lacks_is_absent(void **state)
{
    struct usage u;
    (void)state;
    usage_read(dir, &u);
    assert_int_equal(u.has, 0);
    put_file("cpu.stat", "usage_usec 5\n");
    put_file("memory.peak", "max\n");
    usage_read(dir, &u);
    assert_int_equal(u.has, 1u << USAGE_CPU);
    put_file("io.stat", ""); /* no I/O is a figure */
    usage_read(dir, &u);
    assert_int_equal(u.has, 1u << USAGE_CPU | 1u << USAGE_READ | 1u << USAGE_WRITTEN);
}

static void tasks_of_a_step_are_summed(void **state)
{
    static struct usage_table t;
    struct usage one = {.has = 1u << USAGE_CPU | 1u << USAGE_PEAK | 1u << USAGE_RSS};
    (void)state;
    t.count = 0;
    one.value[USAGE_CPU] = 10;
    one.value[USAGE_PEAK] = 1000;
    one.value[USAGE_RSS] = 700;
    usage_add(usage_step(&t, "0"), &one);
    one.value[USAGE_RSS] = 300;
    usage_add(usage_step(&t, "0"), &one);
    usage_add(usage_step(&t, "batch"), &one);
    assert_int_equal(t.count, 2);
    assert_string_equal(t.step[0].name, "0");
    assert_int_equal(t.step[0].tasks, 2);
    assert_int_equal(t.step[0].usage.value[USAGE_CPU], 20);
    assert_int_equal(t.step[0].usage.value[USAGE_PEAK], 2000);
    assert_int_equal(t.step[0].usage.value[USAGE_RSS], 700);
    one.has = 1u << USAGE_CPU;
    one.value[USAGE_CPU] = UINT64_MAX;
    usage_add(usage_step(&t, "0"), &one);
    assert_int_equal(t.step[0].usage.has, 1u << USAGE_CPU);
    assert_true(t.step[0].usage.value[USAGE_CPU] == UINT64_MAX);
}

static void steps_beyond_the_table_share_its_last_row(void **state)
{
    static struct usage_table t;
    struct usage one = {.has = 1u << USAGE_CPU, .value = {[USAGE_CPU] = 1}};
    char name[16];
    (void)state;
    t.count = 0;
    for (int i = 0; i < 1000; i++) {
        (void)snprintf(name, sizeof name, "%d", i);
        usage_add(usage_step(&t, name), &one);
    }
    assert_int_equal(t.count, USAGE_STEPS_MAX);
    assert_string_equal(t.step[USAGE_STEPS_MAX - 1].name, USAGE_OTHER);
    assert_int_equal(t.step[USAGE_STEPS_MAX - 1].usage.value[USAGE_CPU],
                     1000 - (USAGE_STEPS_MAX - 1));
    assert_ptr_equal(usage_step(&t, "3"), &t.step[3]);
}

static void odd_names_are_no_steps(void **state)
{
    static struct usage_table t;
    (void)state;
    t.count = 0;
    const char *const odd[] = {NULL, "", "0\n", "A", "../x", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"};
    for (size_t i = 0; i < sizeof odd / sizeof odd[0]; i++)
        assert_string_equal(usage_step(&t, odd[i])->name, USAGE_OTHER);
    assert_int_equal(t.count, 1);
}

/* The value of a tag in a row; -1: absent. */
static long long in_row(const struct tlv *row, uint16_t tag)
{
    struct tlv_reader r = {row->data, row->len};
    struct tlv t;
    uint64_t value = 0;
    uint32_t small = 0;
    while (tlv_next(&r, &t) > 0) {
        if (t.tag == tag && tlv_u64(&t, &value) == 0)
            return (long long)value;
        if (t.tag == tag && tlv_u32(&t, &small) == 0)
            return small;
    }
    return -1;
}

static void make_session(const char *name, const char *cpu)
{
    char path[128], file[160];
    (void)snprintf(path, sizeof path, "%s/%s", dir, name);
    assert_int_equal(mkdir(path, 0700), 0);
    (void)snprintf(file, sizeof file, "%s/cpu.stat", name);
    put_file(file, cpu);
    (void)snprintf(file, sizeof file, "%s/memory.events", name);
    put_file(file, memory_events);
}

static void the_reply_has_ended_and_running_programs(void **state)
{
    static struct agent a;
    static struct session running, over;
    static char zero[] = "0";
    struct usage u;
    struct buf b = {0};
    (void)state;
    a = (struct agent){.cgroup = dir};
    running = (struct session){.agent = &a, .number = 7, .started = true, .cgroup_made = true};
    over = (struct session){.agent = &a, .number = 8, .started = true, .cgroup_made = true};
    running.spec.step = over.spec.step = zero;
    over.max_rss = 4096;
    a.sessions = &running;
    running.next = &over;
    put_file("cpu.stat", "usage_usec 100\n");
    make_session("s7", "usage_usec 30\n");
    make_session("s8", "usage_usec 20\n");
    accounting_of_session(&over, &u);
    accounting_count(&over, &u);
    accounting_count(&over, &u); /* only once */
    assert_int_equal(accounting_put(&a, &b), 0);
    struct tlv_reader r = {buf_head(&b), b.len};
    struct tlv t;
    assert_int_equal(tlv_next(&r, &t), 1);
    assert_int_equal(t.tag, TAG_MEMORY_KIB);
    assert_int_equal(tlv_next(&r, &t), 1); /* the whole guest */
    assert_int_equal(t.tag, TAG_USAGE);
    assert_int_equal(in_row(&t, TAG_CPU_US), 100);
    assert_int_equal(in_row(&t, TAG_STEP), -1);
    assert_int_equal(in_row(&t, TAG_PEAK_BYTES), -1);
    assert_int_equal(tlv_next(&r, &t), 1);
    assert_int_equal(in_row(&t, TAG_CPU_US), 50);
    assert_int_equal(in_row(&t, TAG_TASKS), 2);
    assert_int_equal(in_row(&t, TAG_OOM_KILLS), 4);
    assert_int_equal(in_row(&t, TAG_RSS_BYTES), -1); /* one task still runs */
    assert_int_equal(tlv_next(&r, &t), 0);
    buf_free(&b);
}

/* promise: usage.oom */
static void a_step_tells_once_that_memory_was_short(void **state)
{
    static struct agent a;
    static struct session s;
    static char zero[] = "0";
    struct buf b = {0};
    (void)state;
    a = (struct agent){.cgroup = dir, .memory_mib = 345};
    s = (struct session){.agent = &a, .number = 7, .started = true, .cgroup_made = true};
    s.spec.step = zero;
    s.task.arg = &s;
    make_session("s7", cpu_stat);
    accounting_exit_fields(&s.task, &b);
    struct tlv_reader r = {buf_head(&b), b.len};
    struct tlv t;
    uint64_t kills = 0;
    assert_int_equal(tlv_next(&r, &t), 1);
    assert_int_equal(t.tag, TAG_OOM_KILLS);
    assert_int_equal(tlv_u64(&t, &kills), 0);
    assert_int_equal(kills, 2);
    assert_int_equal(tlv_next(&r, &t), 1);
    assert_int_equal(t.tag, TAG_MEMORY_KIB);
    assert_int_equal(tlv_u64(&t, &kills), 0);
    assert_int_equal(kills, 345 * 1024);
    size_t before = b.len;
    accounting_exit_fields(&s.task, &b);
    assert_int_equal(b.len, before);
    buf_free(&b);
}

/* As /proc/meminfo has it. */
static const char meminfo[] = "MemTotal:         406212 kB\nMemFree:          352360 kB\n"
                              "MemAvailable:     353868 kB\nBuffers:               0 kB\n";

/* promise: memory.figure */
static void programs_know_how_much_memory_they_can_use(void **state)
{
    static struct agent a = {.memory_mib = 345};
    struct execspec spec = {0};
    char path[128];
    (void)state;
    put_file("io.stat", meminfo);
    (void)snprintf(path, sizeof path, "%s/io.stat", dir);
    assert_int_equal(memory_available(path), 345);
    put_file("io.stat", "MemTotal: 5 kB\n");
    assert_int_equal(memory_available(path), 0);
    assert_int_equal(memory_available("/none"), 0);
    /* that of another guest, or of an earlier job */
    assert_int_equal(execspec_add_env(&spec, "VHPC_MEM_MB=7"), 0);
    assert_int_equal(memory_environment(&a, &spec), 0);
    assert_string_equal(execspec_getenv(&spec, "VHPC_MEM_MB"), "345");
    execspec_free(&spec);
    /* the first program asks the kernel, and the figure stays */
    a.memory_mib = 0;
    assert_int_equal(memory_environment(&a, &spec), 0);
    assert_true(a.memory_mib > 0);
    execspec_free(&spec);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(the_figures_are_those_of_the_kernel, setup, teardown),
        cmocka_unit_test_setup_teardown(a_figure_that_the_kernel_lacks_is_absent, setup, teardown),
        cmocka_unit_test(tasks_of_a_step_are_summed),
        cmocka_unit_test(steps_beyond_the_table_share_its_last_row),
        cmocka_unit_test(odd_names_are_no_steps),
        cmocka_unit_test_setup_teardown(the_reply_has_ended_and_running_programs, setup, teardown),
        cmocka_unit_test_setup_teardown(a_step_tells_once_that_memory_was_short, setup, teardown),
        cmocka_unit_test_setup_teardown(programs_know_how_much_memory_they_can_use, setup,
                                        teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
