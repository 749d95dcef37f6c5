/* SPDX-License-Identifier: Apache-2.0 */
#include "execspec.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "frame.h"
#include "tlv.h"

static int add_string(char ***list, size_t *count, char *owned)
{
    /* The array grows at powers of two; the entry after the last one is NULL. */
    size_t need = *count + 2;
    if (*list == NULL || (need & (need - 1)) == 0) {
        size_t cap = 4;
        while (cap < need * 2)
            cap *= 2;
        char **grown = realloc(*list, cap * sizeof(char *));
        if (grown == NULL) {
            free(owned);
            return -ENOMEM;
        }
        *list = grown;
    }
    (*list)[(*count)++] = owned;
    (*list)[*count] = NULL;
    return 0;
}

int execspec_add_arg(struct execspec *s, const char *text)
{
    char *copy = strdup(text);
    return copy == NULL ? -ENOMEM : add_string(&s->argv, &s->argc, copy);
}

int execspec_insert_arg(struct execspec *s, size_t at, const char *text)
{
    int rc = execspec_add_arg(s, text);
    for (size_t i = s->argc - 1; rc == 0 && i > at; i--) {
        char *later = s->argv[i];
        s->argv[i] = s->argv[i - 1];
        s->argv[i - 1] = later;
    }
    return rc;
}

int execspec_add_env(struct execspec *s, const char *text)
{
    char *copy = strdup(text);
    return copy == NULL ? -ENOMEM : add_string(&s->envp, &s->envc, copy);
}

const char *execspec_getenv(const struct execspec *s, const char *name)
{
    size_t len = strlen(name);
    for (size_t i = 0; i < s->envc; i++)
        if (strncmp(s->envp[i], name, len) == 0 && s->envp[i][len] == '=')
            return s->envp[i] + len + 1;
    return NULL;
}

void execspec_drop_env(struct execspec *s, const char *prefix)
{
    size_t kept = 0;
    for (size_t i = 0; i < s->envc; i++) {
        if (strncmp(s->envp[i], prefix, strlen(prefix)) == 0)
            free(s->envp[i]);
        else
            s->envp[kept++] = s->envp[i];
    }
    if (s->envp != NULL)
        s->envp[kept] = NULL;
    s->envc = kept;
}

void winsize_unpack(const uint8_t in[8], struct winsize *w)
{
    *w = (struct winsize){
        .ws_row = get_le16(in),
        .ws_col = get_le16(in + 2),
        .ws_xpixel = get_le16(in + 4),
        .ws_ypixel = get_le16(in + 6),
    };
}

static int decode_fds(const struct tlv *t, struct execspec *s)
{
    if (t->len % 2 != 0 || t->len > 2 * VHPC_FDS_MAX)
        return -EPROTO;
    for (uint32_t i = 0; i < t->len; i += 2) {
        uint8_t fd = t->data[i], dir = t->data[i + 1];
        if (fd >= VHPC_FDS_MAX || dir < VHPC_FD_IN || dir > VHPC_FD_BOTH || s->fd_dir[fd] != 0)
            return -EPROTO;
        s->fd_dir[fd] = dir;
    }
    return 0;
}

static int decode_groups(const struct tlv *t, struct execspec *s)
{
    size_t count = t->len / 4;
    if (t->len % 4 != 0 || count > EXEC_GROUPS_MAX)
        return -EPROTO;
    s->groups = malloc(count * sizeof *s->groups + 1);
    if (s->groups == NULL)
        return -ENOMEM;
    for (size_t i = 0; i < count; i++)
        s->groups[i] = get_le32(t->data + 4 * i);
    s->group_count = count;
    return 0;
}

static int decode_rlimit(const struct tlv *t, struct execspec *s)
{
    if (t->len != 20 || s->rlimit_count == EXEC_RLIMITS_MAX)
        return -EPROTO;
    s->rlimit[s->rlimit_count++] = (struct exec_rlimit){
        .resource = get_le32(t->data),
        .soft = get_le64(t->data + 4),
        .hard = get_le64(t->data + 12),
    };
    return 0;
}

static int decode_affinity(const struct tlv *t, struct execspec *s)
{
    if (t->len == 0 || t->len > sizeof s->affinity || s->affinity_len > 0)
        return -EPROTO;
    memcpy(s->affinity, t->data, t->len);
    s->affinity_len = t->len;
    return 0;
}

static int decode_termios(const struct tlv *t, struct execspec *s)
{
    if (t->len != TERMIOS_LEN)
        return -EPROTO;
    s->has_termios = true;
    s->termios.c_iflag = get_le32(t->data);
    s->termios.c_oflag = get_le32(t->data + 4);
    s->termios.c_cflag = get_le32(t->data + 8);
    s->termios.c_lflag = get_le32(t->data + 12);
    memcpy(s->termios.c_cc, t->data + 16, NCCS);
    return 0;
}

static int decode_script(const struct tlv *t, struct execspec *s)
{
    s->script = malloc((size_t)t->len + 1);
    if (s->script == NULL)
        return -ENOMEM;
    if (t->len > 0)
        memcpy(s->script, t->data, t->len);
    s->script_len = t->len;
    return 0;
}

static int decode_list(const struct tlv *t, char ***list, size_t *count)
{
    char *text = NULL;
    int rc = tlv_str(t, &text);
    return rc < 0 ? rc : add_string(list, count, text);
}

static int decode_flag(const struct tlv *t, bool *flag)
{
    uint32_t value = 0;
    int rc = tlv_u32(t, &value);
    *flag = value == 1;
    return rc;
}

static int decode_x11(const struct tlv *t, struct x11_display *x)
{
    if (x->wanted || t->len != 4 + sizeof x->cookie ||
        get_le32(t->data) > UINT16_MAX - VHPC_X11_PORT)
        return -EPROTO;
    x->wanted = true;
    x->number = (uint16_t)get_le32(t->data);
    memcpy(x->cookie, t->data + 4, sizeof x->cookie);
    return 0;
}

static int decode_nice(const struct tlv *t, struct execspec *s)
{
    uint32_t value = 0;
    int rc = tlv_u32(t, &value);
    s->has_nice = true;
    s->nice = (int32_t)value;
    return rc;
}

static int decode_field(const struct tlv *t, struct execspec *s)
{
    switch (t->tag) {
    case TAG_FDS:
        return decode_fds(t, s);
    case TAG_UID:
        return tlv_u32(t, &s->uid);
    case TAG_GID:
        return tlv_u32(t, &s->gid);
    case TAG_GROUPS:
        return decode_groups(t, s);
    case TAG_ARG:
        return decode_list(t, &s->argv, &s->argc);
    case TAG_ENV:
        return decode_list(t, &s->envp, &s->envc);
    case TAG_CWD:
        return tlv_str(t, &s->cwd);
    case TAG_JOINED:
        return decode_flag(t, &s->joined);
    case TAG_UMASK:
        s->has_umask = true;
        return tlv_u32(t, &s->umask);
    case TAG_RLIMIT:
        return decode_rlimit(t, s);
    case TAG_NICE:
        return decode_nice(t, s);
    case TAG_TTY:
    case TAG_TTY_OUT:
        if (t->len != 8 || s->tty || s->tty_out)
            return -EPROTO;
        s->tty = t->tag == TAG_TTY;
        s->tty_out = !s->tty;
        winsize_unpack(t->data, &s->winsize);
        return 0;
    case TAG_TERMIOS:
        return decode_termios(t, s);
    case TAG_SCRIPT_PATH:
        return tlv_str(t, &s->script_path);
    case TAG_SCRIPT_DATA:
        return decode_script(t, s);
    case TAG_AFFINITY:
        return decode_affinity(t, s);
    case TAG_OPERAND:
        return s->operand == 0 ? tlv_u32(t, &s->operand) : -EPROTO;
    case TAG_PMI_REFUSAL:
        return s->pmi_refusal == NULL ? tlv_str(t, &s->pmi_refusal) : -EPROTO;
    case TAG_PMI_NETWORK:
        return decode_flag(t, &s->pmi_network);
    case TAG_PMIX:
        return decode_flag(t, &s->pmix);
    case TAG_DISPLAY:
        return decode_x11(t, &s->x11);
    case TAG_ATTACH:
        return s->attach == NULL ? tlv_str(t, &s->attach) : -EPROTO;
    case TAG_STEP:
        return s->step == NULL ? tlv_str(t, &s->step) : -EPROTO;
    default:
        return 0;
    }
}

int execspec_decode(const uint8_t *data, size_t len, struct execspec *s)
{
    struct tlv_reader r = {data, len};
    struct tlv t;
    uint64_t seen = 0;
    int rc;
    *s = (struct execspec){0};
    while ((rc = tlv_next(&r, &t)) > 0) {
        bool many = t.tag == TAG_ARG || t.tag == TAG_ENV || t.tag == TAG_RLIMIT;
        /*
         * The parties in between have checked the first TAG_UID and TAG_FDS only, so a second one
         * must not be able to replace them.
         */
        if (!many && t.tag < 64 && (seen & (1ull << t.tag)) != 0) {
            rc = -EPROTO;
            break;
        }
        if (t.tag < 64)
            seen |= 1ull << t.tag;
        rc = decode_field(&t, s);
        if (rc < 0)
            break;
    }
    uint64_t must = 1ull << TAG_FDS | 1ull << TAG_UID | 1ull << TAG_GID | 1ull << TAG_ARG;
    bool half_script = (s->script_path == NULL) != (s->script == NULL);
    if (rc == 0 && ((seen & must) != must || half_script || s->operand >= s->argc))
        rc = -EPROTO;
    if (rc < 0)
        execspec_free(s);
    return rc;
}

static void free_list(char **list, size_t count)
{
    for (size_t i = 0; i < count; i++)
        free(list[i]);
    free(list);
}

void execspec_free(struct execspec *s)
{
    free_list(s->argv, s->argc);
    free_list(s->envp, s->envc);
    free(s->groups);
    free(s->cwd);
    free(s->script_path);
    free(s->script);
    free(s->pmi_refusal);
    free(s->step);
    free(s->attach);
    *s = (struct execspec){0};
}
