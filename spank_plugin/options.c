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

static bool parse_count(const struct vhpc_option *option, const char *text,
                        char value[VHPC_VALUE_SIZE], const char **why)
{
    uint64_t number;

    (void)why;
    if (!vhpc_text_number(text, strlen(text), option->most, &number) || number < option->least)
        return false;
    snprintf(value, VHPC_VALUE_SIZE, "%" PRIu64, number);
    return true;
}

/*
 * SIZE[K,M,G,T] of length bytes -> whole MiB.  A plain number is MiB, as in Slurm's --mem; a size
 * in K is rounded up, so that never less is reserved than was asked for.
 */
static bool parse_bytes(const struct vhpc_option *option, const char *text, size_t length,
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
    if (!vhpc_text_number(text, length, (option->most << 20) >> shift, &number))
        return false;
    number = shift < 20 ? (number + 1023) >> 10 : number << (shift - 20);
    if (number < option->least)
        return false;
    snprintf(value, VHPC_VALUE_SIZE, "%" PRIu64, number);
    return true;
}

static bool parse_size(const struct vhpc_option *option, const char *text,
                       char value[VHPC_VALUE_SIZE], const char **why)
{
    (void)why;
    return parse_bytes(option, text, strlen(text), value);
}

/* SIZE[:/MOUNT/POINT] */
static bool parse_disk(const struct vhpc_option *option, const char *text,
                       char value[VHPC_VALUE_SIZE], const char **why)
{
    size_t length = strcspn(text, ":");
    size_t used;

    if (!parse_bytes(option, text, length, value))
        return false;
    if (text[length] == '\0')
        return true;
    if (!vhpc_mount_point_check(text + length + 1, why))
        return false;
    used = strlen(value);
    snprintf(value + used, VHPC_VALUE_SIZE - used, "%s", text + length);
    return true;
}

static bool parse_directory(const struct vhpc_option *option, const char *text,
                            char value[VHPC_VALUE_SIZE], const char **why)
{
    size_t length = strlen(text);

    (void)why;
    if (text[0] != '/' || length > option->most || !vhpc_text_is_plain(text, length))
        return false;
    memcpy(value, text, length + 1);
    return true;
}

/* SRC:DST[:ro],... */
static bool parse_mounts(const struct vhpc_option *option, const char *text,
                         char value[VHPC_VALUE_SIZE], const char **why)
{
    char parts[VHPC_VALUE_SIZE];
    size_t length = strlen(text);

    if (length == 0 || length > option->most || !vhpc_text_is_plain(text, length))
        return false;
    memcpy(parts, text, length + 1);
    memcpy(value, text, length + 1);
    return vhpc_mounts_check(parts, why);
}

static size_t name_length(const char *text)
{
    return strspn(text, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_0123456789");
}

/* Whether this is a variable that says which job this is. */
static bool is_of_the_job(const char *name, size_t length)
{
    static const char *const names[] = {"HOME", "LOGNAME", "OLDPWD", "PWD", "USER"};
    static const char *const prefixes[] = {"PMI", "SLURM", "VHPC_"};

    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (strlen(names[i]) == length && strncmp(name, names[i], length) == 0)
            return true;
    for (size_t i = 0; i < sizeof prefixes / sizeof prefixes[0]; i++)
        if (strncmp(name, prefixes[i], strlen(prefixes[i])) == 0)
            return true;
    return false;
}

/* The length of the name in NAME=VALUE or NAME; 0: another text, or a variable of the job. */
static size_t variable_name(const char *text)
{
    size_t length = name_length(text);

    if (isdigit((unsigned char)text[0]) || is_of_the_job(text, length) ||
        (text[length] != '=' && text[length] != ',' && text[length] != '\0'))
        return 0;
    return length;
}

/* NAME[=VALUE],... */
static bool parse_variables(const struct vhpc_option *option, const char *text,
                            char value[VHPC_VALUE_SIZE], const char **why)
{
    size_t length = strlen(text);

    (void)why;
    if (length == 0 || length > option->most || !vhpc_text_is_plain(text, length))
        return false;
    for (const char *item = text; item != NULL; item = strchr(item, ',')) {
        item += item != text; /* after the comma */
        size_t name = variable_name(item);
        if (name == 0)
            return false;
        for (const char *other = text; other != item; other = strchr(other, ',') + 1)
            if (name_length(other) == name && strncmp(other, item, name) == 0)
                return false;
    }
    memcpy(value, text, length + 1);
    return true;
}

/* The index of the word of length bytes; that of the NULL at the end if there is no such word. */
static size_t find_word(const char *const *words, const char *text, size_t length)
{
    size_t found = 0;

    while (words[found] != NULL &&
           (strlen(words[found]) != length || strncmp(text, words[found], length) != 0))
        found++;
    return found;
}

static bool parse_choice(const struct vhpc_option *option, const char *text,
                         char value[VHPC_VALUE_SIZE], const char **why)
{
    (void)why;
    if (option->words[find_word(option->words, text, strlen(text))] == NULL)
        return false;
    snprintf(value, VHPC_VALUE_SIZE, "%s", text);
    return true;
}

/* The words that are asked for, as bits; 0 if one is unknown or there twice. */
static unsigned asked_words(const char *const *words, const char *text)
{
    unsigned asked = 0;

    for (;; text++) {
        size_t length = strcspn(text, ",");
        size_t found = find_word(words, text, length);

        if (words[found] == NULL || (asked & 1U << found) != 0)
            return 0;
        asked |= 1U << found;
        text += length;
        if (*text == '\0')
            return asked;
    }
}

static bool parse_words(const struct vhpc_option *option, const char *text,
                        char value[VHPC_VALUE_SIZE], const char **why)
{
    unsigned asked;
    size_t used = 0;

    if (strcmp(text, "none") == 0) {
        snprintf(value, VHPC_VALUE_SIZE, "none");
        return true;
    }
    asked = asked_words(option->words, text);
    if (asked == 0)
        return false;
    for (const struct vhpc_words_refused *rule = option->refused; rule->why != NULL; rule++) {
        if ((asked & rule->present) == rule->present && (asked & rule->absent) == 0) {
            *why = rule->why;
            return false;
        }
    }
    for (size_t i = 0; option->words[i] != NULL; i++)
        if ((asked & 1U << i) != 0)
            used += (size_t)snprintf(value + used, VHPC_VALUE_SIZE - used, "%s%s",
                                     used == 0 ? "" : ",", option->words[i]);
    return true;
}

/* N[m] or Nh of length bytes -> minutes; 0: another text, or too many. */
static uint64_t read_interval(const struct vhpc_option *option, const char *text, size_t length)
{
    uint64_t number;
    uint64_t unit = 1;

    if (length > 0 && (text[length - 1] == 'm' || text[length - 1] == 'h'))
        unit = text[--length] == 'h' ? 60 : 1;
    if (!vhpc_text_number(text, length, option->most / unit, &number))
        return 0;
    return number * unit;
}

/* Words, and every:N at most once; minutes get N. */
static bool parse_moments(const struct vhpc_option *option, const char *text,
                          char value[VHPC_VALUE_SIZE], const char **why)
{
    static const char every[] = "every:";
    char words[VHPC_VALUE_SIZE] = "";
    uint64_t minutes = 0;
    size_t used = 0, count = 0;

    if (strlen(text) >= sizeof words)
        return false;
    for (const char *item = text;; item++) {
        size_t length = strcspn(item, ",");

        if (strncmp(item, every, strlen(every)) == 0) {
            if (minutes != 0)
                return false;
            minutes = read_interval(option, item + strlen(every), length - strlen(every));
            if (minutes == 0)
                return false;
        } else {
            used += (size_t)snprintf(words + used, sizeof words - used, "%s%.*s",
                                     count++ == 0 ? "" : ",", (int)length, item);
        }
        item += length;
        if (*item == '\0')
            break;
    }
    value[0] = '\0';
    if (count > 0 && !parse_words(option, words, value, why))
        return false;
    if (minutes == 0)
        return true;
    if (strcmp(value, "none") == 0)
        return false;
    used = strlen(value);
    snprintf(value + used, VHPC_VALUE_SIZE - used, "%s%s%" PRIu64 "m", used == 0 ? "" : ",", every,
             minutes);
    return true;
}

/* Any plain text may name a file; shells are not involved. */
static bool parse_file(const struct vhpc_option *option, const char *text,
                       char value[VHPC_VALUE_SIZE], const char **why)
{
    size_t length = strlen(text);

    (void)why;
    if (length == 0 || length > option->most || !vhpc_text_is_plain(text, length) ||
        text[length - 1] == '/')
        return false;
    memcpy(value, text, length + 1);
    return true;
}

static bool parse_image(const struct vhpc_option *option, const char *text,
                        char value[VHPC_VALUE_SIZE], const char **why)
{
    (void)option;
    return vhpc_image_parse(text, value, why);
}

/* [A-Za-z0-9][A-Za-z0-9._-]{0,63} */
static bool parse_checkpointname(const struct vhpc_option *option, const char *text,
                                 char value[VHPC_VALUE_SIZE], const char **why)
{
    static const char allowed[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";
    size_t length = strspn(text, allowed);

    (void)option;
    (void)why;
    if (length == 0 || length > VHPC_CHECKPOINT_MAX || text[length] != '\0' ||
        strchr("._-", text[0]) != NULL)
        return false;
    memcpy(value, text, length + 1);
    return true;
}

/* Bytes at the beginning of a text that are a name of these characters; 0: none, or too many. */
static size_t cluster_part(const char *text, const char *allowed)
{
    size_t length = strspn(text, allowed);

    return length > VHPC_CLUSTER_MAX || strchr("._-", text[0]) != NULL ? 0 : length;
}

/* [ACCOUNT/]NAME[:keep] */
static bool parse_clustername(const struct vhpc_option *option, const char *text,
                              char value[VHPC_VALUE_SIZE], const char **why)
{
    static const char of_accounts[] = "abcdefghijklmnopqrstuvwxyz0123456789._-";
    static const char of_names[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-";
    size_t account = cluster_part(text, of_accounts);
    const char *name = account > 0 && text[account] == '/' ? text + account + 1 : text;
    size_t length = cluster_part(name, of_names);

    (void)option;
    (void)why;
    if (length == 0 || (name[length] != '\0' && strcmp(name + length, ":keep") != 0))
        return false;
    memcpy(value, text, strlen(text) + 1);
    return true;
}

/* A name in the catalogue of the user: the site's catalogue is not the user's to change. */
static bool parse_ownimage(const struct vhpc_option *option, const char *text,
                           char value[VHPC_VALUE_SIZE], const char **why)
{
    const char *wrong = NULL;

    (void)option;
    (void)why;
    return !vhpc_is_source(text) && strncmp(text, "own/", strlen("own/")) == 0 &&
           strchr(text, '@') == NULL && vhpc_image_parse(text, value, &wrong);
}

const struct vhpc_option vhpc_options[VHPC_OPTION_COUNT] = {
#include "option_table.inc"
};

_Static_assert((int)VHPC_CONSOLE_MOST < VHPC_VALUE_SIZE, "a value does not fit");
_Static_assert((int)VHPC_ENV_MOST < VHPC_VALUE_SIZE, "a value does not fit");
_Static_assert((int)VHPC_WORKDIR_MOST < VHPC_VALUE_SIZE, "a value does not fit");
_Static_assert((int)VHPC_MOUNT_MOST < VHPC_VALUE_SIZE, "a value does not fit");

bool vhpc_values_set(struct vhpc_values *values, enum vhpc_option_id id, const char *origin,
                     const char *text, char *why, size_t size)
{
    char value[VHPC_VALUE_SIZE];
    char shown[VHPC_SHOWN_SIZE];
    const char *expected = vhpc_options[id].expected;

    if (!vhpc_options[id].parse(&vhpc_options[id], text, value, &expected)) {
        snprintf(why, size, "%s=%s: %s", origin, vhpc_text_shown(text, shown, sizeof shown),
                 expected);
        return false;
    }
    memcpy(values->text[id], value, strlen(value) + 1);
    values->set[id] = true;
    return true;
}
