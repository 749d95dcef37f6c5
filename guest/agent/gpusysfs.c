/* SPDX-License-Identifier: Apache-2.0 */
#include "gpusysfs.h"

#include <dirent.h>
#include <glob.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "readtext.h"

enum { NVIDIA = 0x10de, AMD = 0x1002, INTEL = 0x8086, DISPLAY = 0x03, ACCELERATOR = 0x12 };

/* The number in the first file with this pattern; false without such a file or number. */
static bool number_of(const char *device, const char *pattern, int base, uint64_t *out)
{
    char path[512], text[32];
    glob_t found = {0};
    (void)snprintf(path, sizeof path, "%s/%s", device, pattern);
    bool good = glob(path, 0, NULL, &found) == 0 &&
                read_text(found.gl_pathv[0], text, sizeof text) > 0 &&
                text_is_number(text, base, UINT64_MAX, out);
    globfree(&found);
    return good;
}

/* The maker of the GPU; 0 if the device is not a GPU. */
static uint64_t maker_of(const char *device)
{
    uint64_t class = 0, vendor = 0;
    if (!number_of(device, "class", 16, &class) || !number_of(device, "vendor", 16, &vendor))
        return 0;
    if (class >> 16 != DISPLAY && class >> 16 != ACCELERATOR)
        return 0;
    return vendor == NVIDIA || vendor == AMD || vendor == INTEL ? vendor : 0;
}

static DIR *devices_of(const char *sysfs)
{
    char path[256];
    (void)snprintf(path, sizeof path, "%s/bus/pci/devices", sysfs);
    return opendir(path);
}

/* The next GPU, its directory in path; NULL at the end. */
static const char *next_gpu(DIR *all, const char *sysfs, char *path, size_t size, uint64_t *maker)
{
    for (const struct dirent *d; (d = readdir(all)) != NULL;) {
        if (d->d_name[0] == '.' || strlen(d->d_name) >= GPU_ADDRESS_SIZE)
            continue;
        (void)snprintf(path, size, "%s/bus/pci/devices/%s", sysfs, d->d_name);
        *maker = maker_of(path);
        if (*maker != 0)
            return d->d_name;
    }
    return NULL;
}

void gpu_find(const char *sysfs, bool *nvidia, bool *other)
{
    char path[512];
    uint64_t maker;
    DIR *all = devices_of(sysfs);
    *nvidia = *other = false;
    if (all == NULL)
        return;
    while (next_gpu(all, sysfs, path, sizeof path, &maker) != NULL)
        *(maker == NVIDIA ? nvidia : other) = true;
    (void)closedir(all);
}

static void put(struct gpu_record *r, enum gpu_figure figure, uint64_t value)
{
    r->has |= (uint64_t)1 << figure;
    r->value[figure] = value;
}

static struct gpu_before *before_of(struct gpu_sysfs *g, const char *address)
{
    for (size_t i = 0; i < g->count; i++)
        if (strcmp(g->before[i].address, address) == 0)
            return &g->before[i];
    if (g->count == GPU_COUNT_MAX)
        return NULL;
    struct gpu_before *new = &g->before[g->count++];
    *new = (struct gpu_before){0};
    (void)snprintf(new->address, sizeof new->address, "%s", address);
    return new;
}

/* Figures that are the growth of counters since the round before. */
static void growth(const char *device, struct gpu_before *b, long long now, struct gpu_record *r)
{
    uint64_t idle, energy, span = (uint64_t)(now - b->at_ms);
    bool idles = number_of(device, "tile0/gt0/gtidle/idle_residency_ms", 10, &idle) ||
                 number_of(device, "drm/card*/gt/gt0/rc6_residency_ms", 10, &idle);
    bool counts = number_of(device, "hwmon/hwmon*/energy1_input", 10, &energy);
    if (idles && b->has_idle && span > 0 && idle >= b->idle_ms) {
        uint64_t part = (idle - b->idle_ms) * 10000 / span;
        put(r, GPU_BUSY, part < 10000 ? 10000 - part : 0);
    }
    if (counts && b->has_energy && span > 0 && energy >= b->energy_uj && !(r->has >> GPU_POWER & 1))
        put(r, GPU_POWER, (energy - b->energy_uj) / span); /* uJ / ms = mW */
    b->has_idle = idles;
    b->has_energy = counts;
    b->idle_ms = idles ? idle : 0;
    b->energy_uj = counts ? energy : 0;
    b->at_ms = now;
}

size_t gpu_sysfs_round(struct gpu_sysfs *g, long long now, struct gpu_record *out, size_t most)
{
    char path[512];
    const char *address;
    uint64_t maker, value;
    size_t count = 0;
    DIR *all = devices_of(g->root);
    if (all == NULL)
        return 0;
    while (count < most && (address = next_gpu(all, g->root, path, sizeof path, &maker)) != NULL) {
        struct gpu_record r = {0};
        if (maker == NVIDIA)
            continue;
        (void)snprintf(r.address, sizeof r.address, "%s", address);
        if (number_of(path, "gpu_busy_percent", 10, &value))
            put(&r, GPU_BUSY, value * 100);
        if (number_of(path, "mem_info_vram_used", 10, &value))
            put(&r, GPU_MEMORY, value);
        if (number_of(path, "hwmon/hwmon*/power1_average", 10, &value) ||
            number_of(path, "hwmon/hwmon*/power1_input", 10, &value))
            put(&r, GPU_POWER, value / 1000); /* microwatts */
        struct gpu_before *b = maker == INTEL ? before_of(g, address) : NULL;
        if (b != NULL)
            growth(path, b, now, &r);
        if (r.has != 0)
            out[count++] = r;
    }
    (void)closedir(all);
    return count;
}
