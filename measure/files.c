/* SPDX-License-Identifier: Apache-2.0 */
#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "measure.h"

#define BLOCK ((size_t)1024 * 1024)
#define SMALL ((size_t)4096)
#define BIG_FILE "big"

struct place {
    int folder; /* the new folder */
    long mib;
    long count;
    unsigned char *block; /* BLOCK bytes */
};

static bool write_all(int file, const unsigned char *data, size_t size)
{
    while (size > 0) {
        ssize_t done = write(file, data, size);
        if (done < 0 && errno != EINTR) {
            return false;
        }
        if (done > 0) {
            data += done;
            size -= (size_t)done;
        }
    }
    return true;
}

static bool read_all(int file, unsigned char *data, size_t size)
{
    while (size > 0) {
        ssize_t done = read(file, data, size);
        if (done == 0) {
            errno = EIO; /* shorter than what was written */
            return false;
        }
        if (done < 0 && errno != EINTR) {
            return false;
        }
        if (done > 0) {
            data += done;
            size -= (size_t)done;
        }
    }
    return true;
}

/* Sequential write, until fsync has returned. */
static bool write_big(const struct place *place)
{
    int file =
        openat(place->folder, BIG_FILE, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    bool good = file >= 0;
    for (long i = 0; good && i < place->mib; i++) {
        good = write_all(file, place->block, BLOCK);
    }
    good = good && fsync(file) == 0;
    int error = errno;
    if (file >= 0) {
        (void)close(file);
    }
    errno = error;
    return good;
}

/* Sequential read, after this machine's page cache of the file was given up. */
static bool read_big(const struct place *place)
{
    int file = openat(place->folder, BIG_FILE, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    bool good = file >= 0;
    if (good) {
        (void)posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    }
    for (long i = 0; good && i < place->mib; i++) {
        good = read_all(file, place->block, BLOCK);
    }
    if (good && measure_check(place->block, BLOCK, 1) != BLOCK) {
        errno = EILSEQ;
        good = false;
    }
    int error = errno;
    if (file >= 0) {
        (void)close(file);
    }
    errno = error;
    return good;
}

static bool create_one(const struct place *place, const char *name)
{
    int file =
        openat(place->folder, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (file < 0) {
        return false;
    }
    bool good = write_all(file, place->block, SMALL);
    return close(file) == 0 && good;
}

static bool stat_one(const struct place *place, const char *name)
{
    struct stat data;
    if (fstatat(place->folder, name, &data, AT_SYMLINK_NOFOLLOW) != 0) {
        return false;
    }
    errno = EIO;
    return data.st_size == (off_t)SMALL;
}

static bool read_one(const struct place *place, const char *name)
{
    unsigned char data[SMALL];
    int file = openat(place->folder, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    if (file < 0) {
        return false;
    }
    bool good = read_all(file, data, SMALL);
    return close(file) == 0 && good;
}

static bool remove_one(const struct place *place, const char *name)
{
    return unlinkat(place->folder, name, 0) == 0;
}

struct operation {
    const char *name;
    bool (*one)(const struct place *place, const char *name);
};

static const struct operation OPERATIONS[] = {
    {"create_per_s", create_one},
    {"stat_per_s", stat_one},
    {"open_read_per_s", read_one},
    {"remove_per_s", remove_one},
};

static bool metadata(const struct place *place)
{
    for (size_t i = 0; i < sizeof OPERATIONS / sizeof OPERATIONS[0]; i++) {
        double start = measure_now();
        for (long number = 0; number < place->count; number++) {
            char name[32];
            (void)snprintf(name, sizeof name, "f%ld", number);
            if (!OPERATIONS[i].one(place, name)) {
                measure_complain(errno, "%s: file %s", OPERATIONS[i].name, name);
                return false;
            }
        }
        printf("%s %.1f\n", OPERATIONS[i].name, (double)place->count / (measure_now() - start));
    }
    return true;
}

static bool throughput(const struct place *place)
{
    double bytes = (double)place->mib * (double)BLOCK;
    measure_fill(place->block, BLOCK, 1);
    double start = measure_now();
    if (!write_big(place)) {
        measure_complain(errno, "cannot write %ld MiB", place->mib);
        return false;
    }
    printf("write_mb_s %.2f\n", bytes / (measure_now() - start) / 1e6);
    start = measure_now();
    if (!read_big(place)) {
        measure_complain(errno, "cannot read %ld MiB", place->mib);
        return false;
    }
    printf("read_mb_s %.2f\n", bytes / (measure_now() - start) / 1e6);
    return true;
}

/* Remove what an operation that failed has left. */
static void clean(const struct place *place)
{
    (void)unlinkat(place->folder, BIG_FILE, 0);
    for (long number = 0; number < place->count; number++) {
        char name[32];
        (void)snprintf(name, sizeof name, "f%ld", number);
        if (unlinkat(place->folder, name, 0) != 0 && errno == ENOENT) {
            return;
        }
    }
}

int files(const char *folder, long mib, long count)
{
    char path[4096];
    struct place place = {.folder = -1, .mib = mib, .count = count, .block = malloc(BLOCK)};
    int length = snprintf(path, sizeof path, "%s/vhpc-files-XXXXXX", folder);
    if (place.block == NULL || length < 0 || (size_t)length >= sizeof path) {
        measure_complain(0, "the name of the folder is too long, or there is no memory");
        free(place.block);
        return MEASURE_FAILED;
    }
    if (mkdtemp(path) == NULL) {
        measure_complain(errno, "cannot create a folder in %s", folder);
        free(place.block);
        return MEASURE_FAILED;
    }
    place.folder = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    bool good = place.folder >= 0;
    if (!good) {
        measure_complain(errno, "cannot open %s", path);
    } else {
        good = throughput(&place) && metadata(&place);
        clean(&place);
        (void)close(place.folder);
    }
    if (rmdir(path) != 0) {
        measure_complain(errno, "cannot remove %s", path);
        good = false;
    }
    free(place.block);
    return good ? MEASURE_OK : MEASURE_FAILED;
}
