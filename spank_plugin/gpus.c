/* SPDX-License-Identifier: Apache-2.0 */
#include "gpus.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "text.h"

/* No node has more. */
#define GPU_MAX UINT64_C(65535)

/*
 * The next number of a list; at moves to after its separator.  False at the end of the list and if
 * it is not a number.
 */
static bool next(const char **at, char separator, uint64_t *number)
{
    size_t length = strcspn(*at, separator == ',' ? "," : ":");

    if (!vhpc_text_number(*at, length, GPU_MAX, number))
        return false;
    *at += length;
    if (**at == separator)
        (*at)++;
    return true;
}

/* Index in the guest of a GPU with this number on the node; -1 if the guest does not have it. */
static int place_of(const char *gpus, uint64_t wanted)
{
    uint64_t number;

    for (int place = 0; next(&gpus, ':', &number); place++)
        if (number == wanted)
            return place;
    return -1;
}

static uint64_t count_of(const char *list, char separator)
{
    uint64_t number;
    uint64_t count = 0;

    while (next(&list, separator, &number))
        count++;
    return count;
}

bool vhpc_gpus_renumber(const char *gpus, const char *list, char *out, size_t size)
{
    size_t used = 0;
    uint64_t number;

    while (next(&list, ',', &number)) {
        int place = place_of(gpus, number);
        int written;

        if (place < 0)
            return false;
        written = snprintf(out + used, size - used, "%s%d", used == 0 ? "" : ",", place);
        if (written < 0 || (size_t)written >= size - used)
            return false;
        used += (size_t)written;
    }
    return used > 0 && *list == '\0';
}

/* Whether all numbers of a list could be indexes in the guest. */
static bool is_of_guest(const char *gpus, const char *list)
{
    uint64_t count = count_of(gpus, ':');
    uint64_t number;

    while (next(&list, ',', &number))
        if (number >= count)
            return false;
    return *list == '\0';
}

/* The number at an index of Slurm's list; false if the list is shorter. */
static bool at_place(const char *host, uint64_t place, uint64_t *number)
{
    for (uint64_t at = 0; next(&host, ',', number); at++)
        if (at == place)
            return true;
    return false;
}

/*
 * As vhpc_gpus_renumber_visible: Slurm's own list has the node's numbers; another list may have
 * indexes.
 */
static bool counts_places(const char *host, const char *list)
{
    uint64_t number;
    uint64_t unused;

    if (strcmp(list, host) == 0)
        return false;
    while (next(&list, ',', &number))
        if (!at_place(host, number, &unused))
            return false;
    return *list == '\0';
}

bool vhpc_gpus_share(const char *gpus, const char *host, const char *list, bool visible, char *out,
                     size_t size)
{
    bool places = visible && host[0] != '\0' && counts_places(host, list);
    size_t used = 0;
    uint64_t number;

    if (list[0] == '\0')
        return false;
    out[0] = '\0';
    while (next(&list, ',', &number)) {
        int place;
        int written;

        if (places && !at_place(host, number, &number))
            return false;
        place = place_of(gpus, number);
        if (place < 0)
            continue;
        written = snprintf(out + used, size - used, "%s%d", used == 0 ? "" : ",", place);
        if (written < 0 || (size_t)written >= size - used)
            return false;
        used += (size_t)written;
    }
    return *list == '\0';
}

bool vhpc_gpus_renumber_visible(const char *gpus, const char *host, const char *list, char *out,
                                size_t size)
{
    /* As many indexes as Slurm's list has GPUs: of a step with some GPUs of the job, or of the
     * job. */
    if (count_of(host, ',') == count_of(list, ',') && counts_places(host, list))
        return vhpc_gpus_share(gpus, host, list, true, out, size) && out[0] != '\0' &&
               strcmp(out, list) != 0;
    if (strcmp(list, host) != 0 && is_of_guest(gpus, list))
        return false;
    return vhpc_gpus_renumber(gpus, list, out, size);
}
