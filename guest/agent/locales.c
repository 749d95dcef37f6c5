/* SPDX-License-Identifier: Apache-2.0 */
/* Decision: A missing locale becomes C.UTF-8 */
#include "locales.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { NAME_SIZE = 128, NAMES_MAX = 1 << 20 };

/* The head of glibc's locale-archive, as far as its table of names. */
enum { ARCHIVE_MAGIC, STRINGS_AT = 5, STRINGS_USED, ARCHIVE_FIELDS };
static const uint32_t magic = 0xde020109U;

/* As glibc names files: the codeset in lower case and without punctuation, en_US.UTF-8 as .utf8. */
static void normalize(const char *name, char out[NAME_SIZE])
{
    size_t n = strcspn(name, ".");
    (void)snprintf(out, NAME_SIZE, "%.*s", (int)n, name);
    if (name[n] == '\0')
        return;
    const char *codeset = name + n + 1;
    size_t len = strcspn(codeset, "@");
    bool digits = true;
    for (size_t i = 0; i < len; i++)
        digits = digits && !isalpha((unsigned char)codeset[i]);
    size_t at = strlen(out);
    at += (size_t)snprintf(out + at, NAME_SIZE - at, digits ? ".iso" : ".");
    for (size_t i = 0; i < len && at < NAME_SIZE - 1; i++)
        if (isalnum((unsigned char)codeset[i]))
            out[at++] = (char)tolower((unsigned char)codeset[i]);
    (void)snprintf(out + at, NAME_SIZE - at, "%s", codeset + len);
}

static bool is_folder(const char *folder, const char *name)
{
    char path[PATH_MAX];
    struct stat st;
    int n = snprintf(path, sizeof path, "%s/%s", folder, name);
    return n > 0 && (size_t)n < sizeof path && stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

/* Whether a NUL-terminated name is in a table of such names. */
static bool has_name(const char *table, size_t size, const char *name)
{
    size_t len = strlen(name) + 1;
    for (const char *p = table, *end = table + size; (size_t)(end - p) >= len;) {
        if (memcmp(p, name, len) == 0)
            return true;
        const char *next = memchr(p, '\0', (size_t)(end - p));
        if (next == NULL)
            return false;
        p = next + 1;
    }
    return false;
}

/* The file is the image's: nothing in it is trusted. */
static bool is_in_archive(const char *folder, const char *name)
{
    char path[PATH_MAX];
    uint32_t head[ARCHIVE_FIELDS];
    struct stat st;
    bool found = false;
    (void)snprintf(path, sizeof path, "%s/locale-archive", folder);
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return false;
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) &&
        pread(fd, head, sizeof head, 0) == (ssize_t)sizeof head && head[ARCHIVE_MAGIC] == magic &&
        head[STRINGS_USED] <= NAMES_MAX) {
        char *names = malloc(head[STRINGS_USED]);
        ssize_t n = names == NULL ? 0 : pread(fd, names, head[STRINGS_USED], head[STRINGS_AT]);
        found = n > 0 && has_name(names, (size_t)n, name);
        free(names);
    }
    (void)close(fd);
    return found;
}

static bool is_known(const char *folder, const char *name)
{
    char normal[NAME_SIZE];
    if (strcmp(name, "C") == 0 || strcmp(name, "POSIX") == 0 || strchr(name, '/') != NULL)
        return true;
    if (name[0] == '.')
        return false;
    normalize(name, normal);
    return is_folder(folder, name) || is_folder(folder, normal) || is_in_archive(folder, normal);
}

static void tell(const char *variable, const char *name, const char *used)
{
    static bool told;
    if (!told)
        (void)fprintf(stderr,
                      "vhpc-agent: this image has no locale %.64s, the job's %s: %s is used\n",
                      name, variable, used);
    told = true;
}

static int replace(struct execspec *spec, const char *folder, const char *variable)
{
    char entry[64];
    const char *value = execspec_getenv(spec, variable);
    if (value == NULL || value[0] == '\0' || is_known(folder, value))
        return 0;
    const char *used = is_known(folder, "C.UTF-8") ? "C.UTF-8" : "C";
    tell(variable, value, used);
    (void)snprintf(entry, sizeof entry, "%s=", variable);
    execspec_drop_env(spec, entry);
    (void)snprintf(entry, sizeof entry, "%s=%s", variable, used);
    return execspec_add_env(spec, entry);
}

int locales_replace_missing(struct execspec *spec, const char *folder)
{
    static const char *const variables[] = {
        "LANG",       "LC_ALL",       "LC_CTYPE",       "LC_COLLATE",        "LC_MESSAGES",
        "LC_NUMERIC", "LC_TIME",      "LC_MONETARY",    "LC_PAPER",          "LC_NAME",
        "LC_ADDRESS", "LC_TELEPHONE", "LC_MEASUREMENT", "LC_IDENTIFICATION",
    };
    int rc = 0;
    if (execspec_getenv(spec, "LOCPATH") != NULL ||
        execspec_getenv(spec, "LOCALE_ARCHIVE") != NULL || !is_folder(folder, "."))
        return 0;
    for (size_t i = 0; i < sizeof variables / sizeof *variables && rc == 0; i++)
        rc = replace(spec, folder, variables[i]);
    return rc;
}
