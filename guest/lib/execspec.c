/* SPDX-License-Identifier: Apache-2.0 */
#include "execspec.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "frame.h"
#include "tlv.h"

enum { TERMIOS_LEN = 4 * 4 + NCCS };

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

void winsize_pack(uint8_t out[8], const struct winsize *w)
{
    put_le16(out, w->ws_row);
    put_le16(out + 2, w->ws_col);
    put_le16(out + 4, w->ws_xpixel);
    put_le16(out + 6, w->ws_ypixel);
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

static int encode_identity(const struct execspec *s, struct buf *out)
{
    uint8_t fds[2 * VHPC_FDS_MAX];
    size_t len = 0;
    for (int fd = 0; fd < VHPC_FDS_MAX; fd++) {
        if (s->fd_dir[fd] == 0)
            continue;
        fds[len++] = (uint8_t)fd;
        fds[len++] = s->fd_dir[fd];
    }
    int rc = tlv_put(out, TAG_FDS, fds, len);
    rc = rc < 0 ? rc : tlv_put_u32(out, TAG_UID, s->uid);
    rc = rc < 0 ? rc : tlv_put_u32(out, TAG_GID, s->gid);
    if (rc == 0 && s->group_count > 0) {
        uint8_t *raw = malloc(s->group_count * 4);
        if (raw == NULL)
            return -ENOMEM;
        for (size_t i = 0; i < s->group_count; i++)
            put_le32(raw + 4 * i, s->groups[i]);
        rc = tlv_put(out, TAG_GROUPS, raw, s->group_count * 4);
        free(raw);
    }
    return rc;
}

static int encode_limits(const struct execspec *s, struct buf *out)
{
    int rc = 0;
    for (size_t i = 0; i < s->rlimit_count && rc == 0; i++) {
        uint8_t raw[20];
        put_le32(raw, s->rlimit[i].resource);
        put_le64(raw + 4, s->rlimit[i].soft);
        put_le64(raw + 12, s->rlimit[i].hard);
        rc = tlv_put(out, TAG_RLIMIT, raw, sizeof raw);
    }
    if (rc == 0 && s->affinity_len > 0)
        rc = tlv_put(out, TAG_AFFINITY, s->affinity, s->affinity_len);
    if (rc == 0 && s->has_umask)
        rc = tlv_put_u32(out, TAG_UMASK, s->umask);
    if (rc == 0 && s->has_nice)
        rc = tlv_put_u32(out, TAG_NICE, (uint32_t)s->nice);
    return rc;
}

static int encode_tty(const struct execspec *s, struct buf *out)
{
    uint8_t raw[TERMIOS_LEN];
    if (!s->tty && !s->tty_out)
        return 0;
    winsize_pack(raw, &s->winsize);
    int rc = tlv_put(out, s->tty ? TAG_TTY : TAG_TTY_OUT, raw, 8);
    if (rc < 0 || !s->has_termios)
        return rc;
    put_le32(raw, s->termios.c_iflag);
    put_le32(raw + 4, s->termios.c_oflag);
    put_le32(raw + 8, s->termios.c_cflag);
    put_le32(raw + 12, s->termios.c_lflag);
    memcpy(raw + 16, s->termios.c_cc, NCCS);
    return tlv_put(out, TAG_TERMIOS, raw, sizeof raw);
}

int execspec_encode(const struct execspec *s, struct buf *out)
{
    int rc = encode_identity(s, out);
    for (size_t i = 0; i < s->argc && rc == 0; i++)
        rc = tlv_put_str(out, TAG_ARG, s->argv[i]);
    for (size_t i = 0; i < s->envc && rc == 0; i++)
        rc = tlv_put_str(out, TAG_ENV, s->envp[i]);
    if (rc == 0 && s->joined)
        rc = tlv_put_u32(out, TAG_JOINED, 1);
    if (rc == 0 && s->cwd != NULL)
        rc = tlv_put_str(out, TAG_CWD, s->cwd);
    if (rc == 0)
        rc = encode_limits(s, out);
    if (rc == 0)
        rc = encode_tty(s, out);
    if (rc == 0 && s->script_path != NULL) {
        rc = tlv_put_str(out, TAG_SCRIPT_PATH, s->script_path);
        if (rc == 0)
            rc = tlv_put(out, TAG_SCRIPT_DATA, s->script, s->script_len);
    }
    if (rc == 0 && s->operand != 0)
        rc = tlv_put_u32(out, TAG_OPERAND, s->operand);
    if (rc == 0 && s->pmi_refusal != NULL)
        rc = tlv_put_str(out, TAG_PMI_REFUSAL, s->pmi_refusal);
    if (rc == 0 && s->pmi_network)
        rc = tlv_put_u32(out, TAG_PMI_NETWORK, 1);
    if (rc == 0 && s->pmix)
        rc = tlv_put_u32(out, TAG_PMIX, 1);
    if (rc == 0 && s->step != NULL)
        rc = tlv_put_str(out, TAG_STEP, s->step);
    if (rc == 0 && out->len > VHPC_MESSAGE_MAX)
        rc = -EMSGSIZE;
    return rc;
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
    *s = (struct execspec){0};
}
