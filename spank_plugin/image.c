/* SPDX-License-Identifier: Apache-2.0 */
#include "image.h"

#include <stdio.h>
#include <string.h>

#include "bounds.h"
#include "text.h"

static bool is_lower_or_digit(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9');
}

static bool is_upper(char c)
{
    return c >= 'A' && c <= 'Z';
}

/* [a-z0-9][a-z0-9._-]{0,63} */
static bool is_image_name(const char *text, size_t length)
{
    if (length == 0 || length > VHPC_IMAGE_PART_MAX || !is_lower_or_digit(text[0]))
        return false;
    for (size_t i = 1; i < length; i++)
        if (!is_lower_or_digit(text[i]) && text[i] != '.' && text[i] != '_' && text[i] != '-')
            return false;
    return true;
}

/* [A-Za-z0-9_][A-Za-z0-9._-]{0,63} */
static bool is_image_tag(const char *text, size_t length)
{
    if (length == 0 || length > VHPC_IMAGE_PART_MAX || text[0] == '.' || text[0] == '-')
        return false;
    for (size_t i = 0; i < length; i++)
        if (!is_lower_or_digit(text[i]) && !is_upper(text[i]) && text[i] != '.' && text[i] != '_' &&
            text[i] != '-')
            return false;
    return true;
}

/* sha256: and 64 hexadecimal digits in lower case */
static bool is_digest(const char *text)
{
    static const char prefix[] = "sha256:";
    size_t digits;

    if (strncmp(text, prefix, sizeof prefix - 1) != 0)
        return false;
    text += sizeof prefix - 1;
    digits = strspn(text, "0123456789abcdef");
    return digits == VHPC_DIGEST_DIGITS && text[digits] == '\0';
}

bool vhpc_is_source(const char *text)
{
    /* as KINDS of vhpc_slurm.importing.source (tests/unit/importing/test_import_cached.py) */
    static const char *const kinds[] = {
        "oci", "oci-archive", "docker-archive", "tar", "dir", "qcow2", "raw", "vmdk"};
    const char *colon = strchr(text, ':');

    if (strncmp(text, VHPC_OF_CHECKPOINT, strlen(VHPC_OF_CHECKPOINT)) == 0)
        return true;
    if (strncmp(text, "docker://", strlen("docker://")) == 0)
        return text[strlen("docker://")] != '\0';
    if (colon == NULL || strchr(colon, '/') == NULL)
        return false;
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        if (strlen(kinds[i]) == (size_t)(colon - text) &&
            strncmp(kinds[i], text, strlen(kinds[i])) == 0)
            return true;
    return false;
}

bool vhpc_image_parse(const char *given, char value[VHPC_VALUE_SIZE], const char **why)
{
    static const char own[] = "own/";
    bool is_own = strncmp(given, own, sizeof own - 1) == 0;
    const char *text = is_own ? given + sizeof own - 1 : given;
    const char *at = strchr(text, '@');
    size_t length = at == NULL ? strlen(text) : (size_t)(at - text);
    const char *colon = memchr(text, ':', length);
    size_t name = colon == NULL ? length : (size_t)(colon - text);
    const char *tag = colon == NULL ? "latest" : colon + 1;
    size_t tag_length = colon == NULL ? strlen(tag) : length - name - 1;

    if (strcmp(given, VHPC_IMAGE_LIST) == 0) {
        memcpy(value, given, sizeof VHPC_IMAGE_LIST);
        return true;
    }
    if (vhpc_is_source(given)) {
        if (strlen(given) >= VHPC_VALUE_SIZE || !vhpc_text_is_plain(given, strlen(given))) {
            *why = "a source of at most 1024 bytes without control characters is expected";
            return false;
        }
        memcpy(value, given, strlen(given) + 1);
        return true;
    }
    if (!is_image_name(text, name) || !is_image_tag(tag, tag_length) ||
        (at != NULL && !is_digest(at + 1)))
        return false;
    snprintf(value, VHPC_VALUE_SIZE, "%s%.*s:%.*s%s", is_own ? own : "", (int)name, text,
             (int)tag_length, tag, at == NULL ? "" : at);
    return true;
}
