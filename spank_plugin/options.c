/* SPDX-License-Identifier: Apache-2.0 */
#include "options.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "bounds.h"
#include "image.h"
#include "mountpoint.h"
#include "text.h"

/* Largest --vhpc-mem-reserve and --vhpc-disk: 16 TiB in MiB, more than any node has. */
#define SIZE_MAX_MIB UINT64_C(16777216)
#define SIZE_EXPECTED(least, example)                                                              \
    "a size from " least " to 16T is expected: a whole number with the suffix K, M, G or T "       \
    "(without suffix: M), as in " example

/*
 * SIZE[K,M,G,T] of length bytes -> whole MiB, at least least_mib.  A plain number is MiB, as in
 * Slurm's --mem; a size in K is rounded up, so that never less is reserved than was asked for.
 */
static bool parse_size(const char *text, size_t length, uint64_t least_mib,
                       char value[VHPC_VALUE_SIZE])
{
    uint64_t number;
    unsigned shift = 20;

    if (length > 0 && !isdigit((unsigned char)text[length - 1])) {
        static const char suffixes[] = "KMGT";
        const char *suffix = strchr(suffixes, toupper((unsigned char)text[length - 1]));
        if (suffix == NULL)
            return false;
        shift = 10 * (unsigned)(suffix - suffixes + 1);
        length--;
    }
    if (!vhpc_text_number(text, length, (SIZE_MAX_MIB << 20) >> shift, &number))
        return false;
    number = shift < 20 ? (number + 1023) >> 10 : number << (shift - 20);
    if (number < least_mib)
        return false;
    snprintf(value, VHPC_VALUE_SIZE, "%" PRIu64, number);
    return true;
}

static bool parse_mem_reserve(const char *text, char value[VHPC_VALUE_SIZE], const char **why)
{
    *why = SIZE_EXPECTED("1M", "--vhpc-mem-reserve=2G");
    return parse_size(text, strlen(text), 1, value);
}

/* SIZE[:/MOUNT/POINT] */
static bool parse_disk(const char *text, char value[VHPC_VALUE_SIZE], const char **why)
{
    size_t length = strcspn(text, ":");
    size_t used;

    *why = SIZE_EXPECTED("64M", "--vhpc-disk=20G or --vhpc-disk=20G:/local");
    if (!parse_size(text, length, VHPC_DISK_MIN_MIB, value))
        return false;
    if (text[length] == '\0')
        return true;
    if (!vhpc_mount_point_check(text + length + 1, why))
        return false;
    used = strlen(value);
    snprintf(value + used, VHPC_VALUE_SIZE - used, "%s", text + length);
    return true;
}

static bool parse_batch(const char *text, char value[VHPC_VALUE_SIZE], const char **why)
{
    if (strcmp(text, "guest") != 0 && strcmp(text, "host") != 0) {
        *why = "'guest' or 'host' is expected";
        return false;
    }
    snprintf(value, VHPC_VALUE_SIZE, "%s", text);
    return true;
}

static bool parse_timeout(const char *text, char value[VHPC_VALUE_SIZE], const char **why)
{
    uint64_t seconds;

    if (!vhpc_text_number(text, strlen(text), VHPC_TIMEOUT_MAX_S, &seconds) || seconds == 0) {
        *why = "a whole number of seconds from 1 to 3600 is expected";
        return false;
    }
    snprintf(value, VHPC_VALUE_SIZE, "%" PRIu64, seconds);
    return true;
}

static bool parse_vfs(const char *text, char value[VHPC_VALUE_SIZE], const char **why)
{
    uint64_t number;

    if (!vhpc_text_number(text, strlen(text), VHPC_VFS_MAX, &number)) {
        *why = "a whole number from 0 to 256 is expected";
        return false;
    }
    snprintf(value, VHPC_VALUE_SIZE, "%" PRIu64, number);
    return true;
}

static bool parse_guests_per_node(const char *text, char value[VHPC_VALUE_SIZE], const char **why)
{
    uint64_t number;

    if (!vhpc_text_number(text, strlen(text), VHPC_GUESTS_MAX, &number) || number == 0) {
        *why = "a whole number from 1 to 64 is expected";
        return false;
    }
    snprintf(value, VHPC_VALUE_SIZE, "%" PRIu64, number);
    return true;
}

/* The site's policy says which of them a job may have; vhpcd knows it. */
static bool parse_network(const char *text, char value[VHPC_VALUE_SIZE], const char **why)
{
    /* in the order of the canonical form */
    static const char *const parts[] = {"job", "multicast", "nat", "site"};
    enum { JOB = 1, MULTICAST = 2, NAT = 4, SITE = 8, COUNT = sizeof parts / sizeof *parts };
    unsigned asked = 0;

    if (strcmp(text, "none") == 0) {
        snprintf(value, VHPC_VALUE_SIZE, "none");
        return true;
    }
    *why =
        "'none' or a list of 'job', 'multicast', 'nat' and 'site' is expected, such as 'job,nat'";
    for (const char *at = text;; at++) {
        size_t length = strcspn(at, ",");
        size_t found = 0;
        while (found < COUNT &&
               (strlen(parts[found]) != length || strncmp(at, parts[found], length) != 0))
            found++;
        if (found == COUNT || (asked & 1U << found) != 0)
            return false;
        asked |= 1U << found;
        at += length;
        if (*at == '\0')
            break;
    }
    if ((asked & (JOB | MULTICAST)) == MULTICAST) {
        *why = "multicast is for the network of 'job': 'job,multicast' is expected";
        return false;
    }
    if ((asked & (NAT | SITE)) == (NAT | SITE)) {
        *why = "nat and site both lead to other networks: one of them is expected";
        return false;
    }
    size_t used = 0;
    for (size_t i = 0; i < COUNT; i++)
        if ((asked & 1U << i) != 0)
            used += (size_t)snprintf(value + used, VHPC_VALUE_SIZE - used, "%s%s",
                                     used == 0 ? "" : ",", parts[i]);
    return true;
}

/* Any plain text may name a file; shells are not involved. */
static bool parse_console(const char *text, char value[VHPC_VALUE_SIZE], const char **why)
{
    size_t length = strlen(text);

    if (length == 0 || length >= VHPC_VALUE_SIZE || !vhpc_text_is_plain(text, length) ||
        text[length - 1] == '/') {
        *why = "the path of a file is expected, at most 1024 bytes of UTF-8 without control "
               "characters";
        return false;
    }
    memcpy(value, text, length + 1);
    return true;
}

/* A name in the catalogue of the user: the site's catalogue is not the user's to change. */
static bool parse_save(const char *text, char value[VHPC_VALUE_SIZE], const char **why)
{
    const char *wrong = NULL;
    bool good = !vhpc_is_source(text) && strncmp(text, "own/", strlen("own/")) == 0 &&
                strchr(text, '@') == NULL && vhpc_image_parse(text, value, &wrong);

    if (!good)
        *why = "own/NAME[:TAG] is expected, a name in your own catalogue of images";
    return good;
}

const struct vhpc_option vhpc_options[VHPC_OPTION_COUNT] = {
    [VHPC_IMAGE] =
        {
            .name = "vhpc-image",
            .arginfo = "[own/]NAME[:TAG][@DIGEST]|SOURCE",
            .variable = "VHPC_IMAGE",
            .usage = "run the job inside KVM guests of this image on its nodes",
            .detail =
                "Run the batch script and each task of the job inside KVM guests. On each node of "
                "the job, guests are booted from the image NAME for this job alone, and removed "
                "when the job ends. The default of TAG is latest. All nodes boot the same bytes: "
                "the name is resolved to a digest once, when the job starts; sacct shows the "
                "digest in "
                "AdminComment. NAME@sha256:DIGEST is the image of that digest, whatever the name "
                "points to when the job starts. own/NAME is an image of the user's own catalogue, "
                "if the "
                "site has such catalogues. SOURCE is docker://NAME or KIND:PATH with a slash in "
                "the path, as for `vhpc image import`: it is imported into the user's own "
                "catalogue "
                "before the job is created, unless it is there already, and the job gets the "
                "digest of the result. The word list in place of a name prints the names of the "
                "images that the user may use here, and no job is created; an image of this name "
                "is list:latest. Within a job the "
                "option may be repeated for a step, but only with "
                "the job's own image; a step without it runs in the guests too.",
            .parse = vhpc_image_parse,
        },
    [VHPC_MEM_RESERVE] =
        {
            .name = "vhpc-mem-reserve",
            .arginfo = "SIZE",
            .variable = "VHPC_MEM_RESERVE",
            .usage =
                "memory of the job kept on the host side of each node [KMGT] (default unit: M)",
            .detail =
                "Memory on each node that is taken from the job's allocation for the host side: "
                "the virtual machine monitor, file sharing, and the batch script with "
                "--vhpc-batch=host. The guests get the rest. A whole number with the suffix K, M, "
                "G or T; without suffix it is MiB, as for --mem. Parts of a MiB are rounded up. "
                "The site sets the default and may set a minimum.",
            .parse = parse_mem_reserve,
        },
    [VHPC_BATCH] =
        {
            .name = "vhpc-batch",
            .arginfo = "guest|host",
            .variable = "VHPC_BATCH",
            .usage = "where the batch script runs; srun's tasks run in guests either way",
            .detail =
                "guest (the default) runs the batch script, or salloc's interactive shell, in the "
                "guest of the job's first node. host leaves it on the node itself, and only the "
                "tasks that srun starts go into the guests.",
            .parse = parse_batch,
        },
    [VHPC_TIMEOUT] =
        {
            .name = "vhpc-timeout",
            .arginfo = "SECONDS",
            .variable = "VHPC_TIMEOUT",
            .usage = "how long a guest may take to boot before the job fails",
            .detail =
                "Longest time from the start of a guest until its agent is ready, in seconds, 1 to "
                "3600. If a guest takes longer, the job fails with one line on its stderr. The "
                "site sets the default and an upper limit.",
            .parse = parse_timeout,
        },
    [VHPC_CONSOLE] =
        {
            .name = "vhpc-console",
            .arginfo = "PATH",
            .variable = "VHPC_CONSOLE",
            .usage = "file that gets the guests' console output",
            .detail =
                "File that receives the console output of the guests when they end, written as the "
                "user. A relative path is relative to the job's working directory. At most 1024 "
                "bytes of UTF-8 without control characters. The file is created when the job "
                "starts; if that fails, a line on the job's standard error says so and the job "
                "continues. Failures at the end are in the AdminComment that sacct shows.",
            .parse = parse_console,
        },
    [VHPC_VFS] =
        {
            .name = "vhpc-vfs",
            .arginfo = "N",
            .variable = "VHPC_VFS",
            .usage = "virtual functions of network adapters for the guests of each node",
            .detail =
                "Virtual functions of the node's InfiniBand or Ethernet adapters for the guests of "
                "each node; those nearest to their GPUs and cores are used. If the site has Slurm "
                "count them as a generic resource, --gres asks for them and this option can only "
                "ask for fewer; with 0 the guests get none.",
            .parse = parse_vfs,
        },
    [VHPC_GUESTS_PER_NODE] =
        {
            .name = "vhpc-guests-per-node",
            .arginfo = "N",
            .variable = "VHPC_GUESTS_PER_NODE",
            .usage = "how many guests each node of the job has; its cores, memory and devices are "
                     "divided",
            .detail =
                "Guests on each node, 1 to 64; the default is 1. The job's cores on a node are "
                "divided among them as evenly as whole cores can be, each guest within a NUMA cell "
                "where possible, and its memory, GPUs and virtual functions likewise. The batch "
                "script runs in the first guest of the first node. Of the N tasks that a step has "
                "on a node with K guests, the task with the local id I (SLURM_LOCALID) runs in "
                "guest I*K/N, rounded down: tasks fill the guests in blocks, in their order. A "
                "guest is called NODE-g0, NODE-g1 and so on, and a task sees those of its step's "
                "GPUs that its own guest has. All guests of a job start, or none.",
            .parse = parse_guests_per_node,
        },
    [VHPC_NETWORK] =
        {
            .name = "vhpc-network",
            .arginfo = "none|LIST",
            .variable = "VHPC_NETWORK",
            .usage = "which network the guests of the job have",
            .detail =
                "none, or a list of words with commas between them. job gives each guest an "
                "interface (vhpc0) on a network that only the guests of this job are on. They "
                "reach each other by their host names, over IPv4 and IPv6; VHPC_NODELIST has the "
                "names of all of them, with commas between them. Nothing else can be reached "
                "through it, and broadcasts reach only the guests of the same node. multicast, "
                "beside job: broadcast and multicast frames of a guest reach all guests of the "
                "job, for programs that find each other in this way; the site limits the number "
                "of guests. nat gives each guest an interface (nat0) by which its programs open "
                "TCP and UDP connections over IPv4 to networks outside of the site, and to those "
                "that the site has chosen, with the address of the node; no host can connect to "
                "the guest. site gives each guest an interface (site0) on a network that the site "
                "has made for guests, and that guests of other jobs and users are on too; not "
                "together with nat. none: the guests have no network. The site sets the default "
                "and which of them are allowed; a job that asks for another fails with one line "
                "on its stderr.",
            .parse = parse_network,
        },
    [VHPC_DISK] =
        {
            .name = "vhpc-disk",
            .arginfo = "SIZE[:/MOUNT/POINT]",
            .variable = "VHPC_DISK",
            .usage = "disk of each guest, for what the job writes outside of shared folders or at "
                     "the mount point only [KMGT] (default unit: M)",
            .detail =
                "Size of a disk that each guest gets on the storage of its node. With a size "
                "alone, what the job writes outside of shared folders (/tmp, /var, installed "
                "packages) goes to this disk; without the option it goes to memory of the guest, "
                "half of it at most. With a mount point, as in 20G:/local, the disk is mounted "
                "at this directory, and only what the job writes there goes to it. The directory "
                "is made if the image lacks it, belongs to the user with mode 0700 (/tmp and "
                "/var/tmp: to root, with mode 1777), and what the image has there cannot be seen. "
                "The mount point is an absolute path of letters, digits and the characters / . _ "
                "+ -, at most 255, without . or .. as a part. It cannot be /, /var or /var/lib, "
                "nor on or below /bin, /boot, /dev, /etc, /home, /lib*, /proc, /run, /sbin, /sys "
                "or /usr, nor above, on or below the home or a shared folder. The "
                "space is reserved when the job starts and free again when it ends; then the disk "
                "and all files on it are gone. A whole number with the suffix K, M, G or T; "
                "without suffix it is MiB, as for --mem. At least 64 MiB. The site sets the "
                "largest size, and may give no disks.",
            .parse = parse_disk,
        },
    [VHPC_SAVE] =
        {
            .name = "vhpc-save",
            .arginfo = "own/NAME[:TAG]",
            .variable = "VHPC_SAVE",
            .usage = "make an image of the guest when the batch script has succeeded",
            .detail =
                "When the batch script ends with status 0, what the job's first guest has in its "
                "root then becomes the image NAME of the user's own catalogue, as by `vhpc save`. "
                "The job ends when that is done, within its time limit; if it fails, so does the "
                "job, with one line on its stderr. For sbatch only, with the batch script in the "
                "guest, and where the site has catalogues of users.",
            .parse = parse_save,
        },
};

bool vhpc_values_set(struct vhpc_values *values, enum vhpc_option_id id, const char *origin,
                     const char *text, char *why, size_t size)
{
    char value[VHPC_VALUE_SIZE];
    char shown[VHPC_SHOWN_SIZE];
    const char *expected = NULL;

    if (!vhpc_options[id].parse(text, value, &expected)) {
        snprintf(why, size, "%s=%s: %s", origin, vhpc_text_shown(text, shown, sizeof shown),
                 expected);
        return false;
    }
    memcpy(values->text[id], value, strlen(value) + 1);
    values->set[id] = true;
    return true;
}
