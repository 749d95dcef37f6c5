/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Counters of GPUs: from NVML's stand-in, which also hangs, crashes and lacks, and from sysfs as
 * the kernel's documentation of amdgpu and xe describes it.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "gpus.h"
#include "gpusysfs.h"
#include "textfile.h"

static char dir[64];

static int setup(void **state)
{
    (void)state;
    (void)snprintf(dir, sizeof dir, "/tmp/vhpc-test-XXXXXX");
    return mkdtemp(dir) == NULL || chmod(dir, 0755) < 0 ? -1 : 0;
}

static int teardown(void **state)
{
    (void)state;
    return remove_folder(dir);
}

static void put(const char *address, const char *name, const char *text)
{
    char path[512];
    (void)snprintf(path, sizeof path, "%s/bus/pci/devices/%s/%s", dir, address, name);
    for (char *slash = path + strlen(dir) + 1; (slash = strchr(slash, '/')) != NULL; slash++) {
        *slash = '\0';
        (void)mkdir(path, 0755);
        *slash = '/';
    }
    put_text(path, text);
}

static void put_gpu(const char *address, const char *class, const char *vendor)
{
    put(address, "class", class);
    put(address, "vendor", vendor);
}

static void amdgpu_has_use_memory_and_power(void **state)
{
    static struct gpu_sysfs g;
    struct gpu_record r[2];
    (void)state;
    g = (struct gpu_sysfs){.root = dir};
    put_gpu("0000:00:01.0", "0x020000\n", "0x8086\n"); /* a network card */
    put_gpu("0000:05:00.0", "0x120000\n", "0x1002\n");
    put("0000:05:00.0", "gpu_busy_percent", "83\n");
    put("0000:05:00.0", "mem_info_vram_used", "1073741824\n");
    put("0000:05:00.0", "hwmon/hwmon3/power1_average", "312000000\n");
    assert_int_equal(gpu_sysfs_round(&g, 1000, r, 2), 1);
    assert_string_equal(r[0].address, "0000:05:00.0");
    assert_int_equal(r[0].has, 7);
    assert_int_equal(r[0].value[GPU_BUSY], 8300);
    assert_int_equal(r[0].value[GPU_MEMORY], 1073741824);
    assert_int_equal(r[0].value[GPU_POWER], 312000);
}

static void xe_has_the_growth_of_its_counters(void **state)
{
    static struct gpu_sysfs g;
    struct gpu_record r[2];
    (void)state;
    g = (struct gpu_sysfs){.root = dir};
    put_gpu("0000:06:00.0", "0x038000\n", "0x8086\n");
    put("0000:06:00.0", "tile0/gt0/gtidle/idle_residency_ms", "5000\n");
    put("0000:06:00.0", "hwmon/hwmon1/energy1_input", "1000000\n");
    assert_int_equal(gpu_sysfs_round(&g, 1000, r, 2), 0);
    put("0000:06:00.0", "tile0/gt0/gtidle/idle_residency_ms", "5250\n");
    put("0000:06:00.0", "hwmon/hwmon1/energy1_input", "151000000\n");
    assert_int_equal(gpu_sysfs_round(&g, 2000, r, 2), 1);
    assert_int_equal(r[0].has, 1 << GPU_BUSY | 1 << GPU_POWER);
    assert_int_equal(r[0].value[GPU_BUSY], 7500);
    assert_int_equal(r[0].value[GPU_POWER], 150000);
}

/* Run the readers until a GPU has so many records, or one of them has ended. */
static void run_nvml(struct gpus *g, const char *library, uint64_t records)
{
    struct loop loop = {0};
    long long until = now_ms() + 60000;
    char name[64];
    int status;
    put_gpu("0000:05:00.0", "0x030200\n", "0x10de\n");
    gpus_start(g, &loop, dir, library, 10);
    while (g->missing[0] == '\0' && (g->count < 2 || g->gpu[1].count[GPU_MEMORY] < records)) {
        assert_true(now_ms() < until);
        assert_int_equal(loop_once(&loop, 20), 0);
        for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;)
            gpus_reaped(g, pid, status);
    }
    if (g->nvml.pid > 0) {
        (void)snprintf(name, sizeof name, "/proc/%d/comm", (int)g->nvml.pid);
        expect_text(name, "vhpc-nvml\n"); /* as ps and pidof show it */
    }
    gpus_stop(g);
    loop_free(&loop);
}

static void nvml_has_what_it_supports(void **state)
{
    static struct gpus g;
    (void)state;
    run_nvml(&g, STANDIN, 3);
    assert_string_equal(g.missing, "");
    assert_string_equal(g.gpu[0].address, "0000:05:00.0");
    assert_string_equal(g.gpu[1].address, "0000:af:00.0");
    assert_int_equal(g.gpu[0].sum[GPU_BUSY], 7500 * g.gpu[0].count[GPU_BUSY]);
    assert_int_equal(g.gpu[0].sum[GPU_POWER], 250500 * g.gpu[0].count[GPU_POWER]);
    assert_int_equal(g.gpu[1].count[GPU_BUSY], 0);
    assert_int_equal(g.gpu[1].count[GPU_POWER], 0);
    assert_true(g.gpu[1].peak == 3ull << 30);
}

static void nvml_that_fails_costs_the_figures_only(void **state)
{
    static struct gpus g;
    (void)state;
    run_nvml(&g, "/nonexistent/libnvidia-ml.so.1", 1);
    assert_string_equal(g.missing, "the image has no libnvidia-ml.so.1");
    run_nvml(&g, STANDIN_CRASHES, 1);
    assert_non_null(strstr(g.missing, "NVML of the image was ended by signal"));
    run_nvml(&g, STANDIN_HANGS, 1);
    assert_string_equal(g.missing, "NVML of the image has not answered for 10 s");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(amdgpu_has_use_memory_and_power, setup, teardown),
        cmocka_unit_test_setup_teardown(xe_has_the_growth_of_its_counters, setup, teardown),
        cmocka_unit_test_setup_teardown(nvml_has_what_it_supports, setup, teardown),
        cmocka_unit_test_setup_teardown(nvml_that_fails_costs_the_figures_only, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
