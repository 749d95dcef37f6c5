/* SPDX-License-Identifier: Apache-2.0 */
/* Decision: The guest checks its ports, too */
#include "ibports.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { STATE_ACTIVE = 4, VALUE_MAX = 64, NAME_MAX_DIGITS = 9 };

/* Deviations in one line; what does not fit is left out. */
struct report {
    char *text;
    size_t size;
    bool bad;
};

static void complain(struct report *r, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

static void complain(struct report *r, const char *format, ...)
{
    size_t used = strlen(r->text);
    va_list args;
    if (r->bad && used + 3 < r->size) {
        (void)memcpy(r->text + used, "; ", 3);
        used += 2;
    }
    r->bad = true;
    va_start(args, format);
    (void)vsnprintf(r->text + used, r->size - used, format, args);
    va_end(args);
}

/* Reads a file of one short line below dir, without its line end. 0 or -errno. */
static int read_value(int dir, const char *name, char value[VALUE_MAX])
{
    struct stat st;
    /* O_NONBLOCK: do not hang on a file that is not from sysfs. */
    int fd = openat(dir, name, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    ssize_t n = fstat(fd, &st) == 0 && S_ISREG(st.st_mode) ? read(fd, value, VALUE_MAX - 1) : -1;
    int rc = n < 0 ? -EIO : 0;
    (void)close(fd);
    value[n > 0 ? n : 0] = '\0';
    size_t len = strcspn(value, "\n");
    /* One printable line, so that it can be shown. */
    for (size_t i = 0; i < len; i++)
        if (value[i] < 0x20 || value[i] > 0x7e)
            rc = -EBADMSG;
    if (rc == 0 && (ssize_t)len != n && (ssize_t)len + 1 != n)
        rc = -EBADMSG;
    value[len] = '\0';
    return rc;
}

/* Only decimal digits, and only a few. */
static bool parse_number(const char *text, unsigned *number)
{
    size_t len = strspn(text, "0123456789");
    if (len == 0 || len > NAME_MAX_DIGITS || text[len] != '\0')
        return false;
    *number = (unsigned)strtoul(text, NULL, 10);
    return true;
}

/* Eight groups of four digits, as the kernel prints a GID; its lower half is the port's GUID. */
static bool parse_gid(const char *text, uint64_t *guid)
{
    *guid = 0;
    for (int group = 0; group < 8; group++, text += 5) {
        if (strspn(text, "0123456789abcdef") != 4 || text[4] != (group < 7 ? ':' : '\0'))
            return false;
        if (group >= 4)
            *guid = *guid << 16 | strtoul(text, NULL, 16);
    }
    return true;
}

static bool parse_pkey(const char *text, uint16_t *pkey)
{
    if (strncmp(text, "0x", 2) != 0 || strspn(text + 2, "0123456789abcdef") != 4 || text[6] != '\0')
        return false;
    *pkey = (uint16_t)strtoul(text + 2, NULL, 16);
    return true;
}

static int open_dir(int dir, const char *name)
{
    int fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return fd < 0 ? -errno : fd;
}

/* State of a port. */
struct seen {
    const char *device;
    unsigned number;
    uint64_t guid;
    uint16_t key[IB_TABLE_MAX]; /* valid entries */
    unsigned index[IB_TABLE_MAX];
    size_t key_count;
};

static bool read_table(int port, struct seen *s, struct report *r)
{
    unsigned entries = 0, number;
    char name[16], value[VALUE_MAX] = "";
    uint16_t pkey;
    int fd = open_dir(port, "pkeys");
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    if (dir == NULL) {
        complain(r, "%s port %u has no table of keys", s->device, s->number);
        if (fd >= 0)
            (void)close(fd);
        return false;
    }
    for (const struct dirent *e; (e = readdir(dir)) != NULL;)
        entries += parse_number(e->d_name, &number) ? 1 : 0;
    bool good = entries > 0 && entries <= IB_TABLE_MAX;
    if (!good)
        complain(r, "%s port %u has a table of %u keys", s->device, s->number, entries);
    for (unsigned i = 0; good && i < entries; i++) {
        (void)snprintf(name, sizeof name, "%u", i);
        int rc = read_value(dirfd(dir), name, value);
        good = rc == 0 && parse_pkey(value, &pkey);
        if (!good)
            complain(r, "%s port %u: key %u is %s", s->device, s->number, i,
                     rc == 0 ? "none" : strerror(-rc));
        /* An entry whose key is 0 is empty, whatever its membership bit. */
        if (good && (pkey & ~IB_PKEY_FULL) != 0) {
            s->key[s->key_count] = pkey;
            s->index[s->key_count++] = i;
        }
    }
    (void)closedir(dir);
    return good;
}

static bool has(const uint16_t *keys, size_t count, uint16_t key)
{
    for (size_t i = 0; i < count; i++)
        if (keys[i] == key)
            return true;
    return false;
}

static void put_keys(char *text, size_t size, const uint16_t *keys, size_t count)
{
    enum { SHOWN = 8 };
    size_t used = 0;
    (void)snprintf(text, size, "none");
    for (size_t i = 0; i < count && i < SHOWN && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s0x%04x", i > 0 ? " " : "", keys[i]);
    if (count > SHOWN && used < size)
        (void)snprintf(text + used, size - used, " and %zu more", count - SHOWN);
}

static void judge_keys(const struct ib_want *want, const struct seen *s, struct report *r)
{
    char seen[128], wanted[128];
    bool same = true;
    for (size_t i = 0; i < s->key_count; i++)
        same = same && has(want->key, want->key_count, s->key[i]);
    for (size_t i = 0; i < want->key_count; i++)
        same = same && has(s->key, s->key_count, want->key[i]);
    if (same)
        return;
    put_keys(seen, sizeof seen, s->key, s->key_count);
    put_keys(wanted, sizeof wanted, want->key, want->key_count);
    complain(r, "%s port %u has the keys %s, and should have %s", s->device, s->number, seen,
             wanted);
}

static void judge_port(int port, const struct ib_want *want, struct seen *s, struct ib_found *found,
                       struct report *r)
{
    char value[VALUE_MAX] = "";
    int rc = read_value(port, "link_layer", value);
    size_t place = 0;
    if (rc == 0 && strcmp(value, "Ethernet") == 0)
        return;
    rc = read_value(port, "gids/0", value);
    if (rc < 0 || !parse_gid(value, &s->guid)) {
        complain(r, "%s port %u has no GID: %s", s->device, s->number,
                 rc < 0 ? strerror(-rc) : value);
        return;
    }
    while (place < want->guid_count && want->guid[place] != s->guid)
        place++;
    if (place == want->guid_count) {
        complain(r, "%s port %u has the GUID 0x%016llx, which is not the job's", s->device,
                 s->number, (unsigned long long)s->guid);
        return;
    }
    if (found->port[place].device[0] != '\0') {
        complain(r, "%s port %u has the GUID of %s port %u", s->device, s->number,
                 found->port[place].device, found->port[place].number);
        return;
    }
    (void)snprintf(found->port[place].device, IB_DEVICE_MAX, "%s", s->device);
    found->port[place].number = s->number;
    found->count++;
    rc = read_value(port, "state", value);
    if (rc < 0 || strtoul(value, NULL, 10) != STATE_ACTIVE ||
        strncmp(value + strspn(value, "0123456789"), ": ", 2) != 0)
        complain(r, "%s port %u is not active: %s", s->device, s->number,
                 rc < 0 ? strerror(-rc) : value);
    if (!read_table(port, s, r))
        return;
    judge_keys(want, s, r);
    for (size_t i = s->key_count; i > 0; i--)
        if (s->key[i - 1] == want->key[0])
            found->port[place].index = s->index[i - 1];
}

static void judge_device(int class, const char *device, const struct ib_want *want,
                         struct ib_found *found, struct report *r)
{
    int fd = -1, here = open_dir(class, device);
    DIR *dir = NULL;
    if (here >= 0)
        fd = open_dir(here, "ports");
    if (fd >= 0)
        dir = fdopendir(fd);
    if (dir == NULL) {
        complain(r, "%s has no ports", device);
        if (fd >= 0)
            (void)close(fd);
    }
    for (const struct dirent *e; dir != NULL && (e = readdir(dir)) != NULL;) {
        struct seen *s = calloc(1, sizeof *s);
        int port = -1;
        if (s == NULL) {
            complain(r, "out of memory");
        } else if (parse_number(e->d_name, &s->number)) {
            s->device = device;
            port = open_dir(dirfd(dir), e->d_name);
            if (port >= 0)
                judge_port(port, want, s, found, r);
        }
        if (port >= 0)
            (void)close(port);
        free(s);
    }
    if (dir != NULL)
        (void)closedir(dir);
    if (here >= 0)
        (void)close(here);
}

/* A name that NCCL's and UCX's lists can contain. */
static bool is_device(const char *name)
{
    static const char allowed[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.";
    size_t len = strlen(name);
    return name[0] != '.' && len < IB_DEVICE_MAX && strspn(name, allowed) == len;
}

bool ib_check(const char *sysfs, const struct ib_want *want, struct ib_found *found, char *text,
              size_t size)
{
    struct report r = {.text = text, .size = size};
    char path[4096];
    bool any = false;
    *found = (struct ib_found){0};
    text[0] = '\0';
    (void)snprintf(path, sizeof path, "%s/class/infiniband", sysfs);
    DIR *dir = opendir(path);
    /* Without a driver the directory does not exist. */
    for (const struct dirent *e; dir != NULL && (e = readdir(dir)) != NULL;) {
        any = any || e->d_name[0] != '.';
        if (is_device(e->d_name))
            judge_device(dirfd(dir), e->d_name, want, found, &r);
        else if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0)
            complain(&r, "an adapter has an invalid name");
    }
    if (dir != NULL)
        (void)closedir(dir);
    if (!any)
        complain(&r, "no InfiniBand adapter (does the image have a driver for it?)");
    for (size_t i = 0; any && i < want->guid_count; i++)
        if (found->port[i].device[0] == '\0')
            complain(&r, "there is no port with the GUID 0x%016llx",
                     (unsigned long long)want->guid[i]);
    return !r.bad;
}
