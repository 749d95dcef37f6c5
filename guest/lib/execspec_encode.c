/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "execspec.h"
#include "frame.h"
#include "tlv.h"

void winsize_pack(uint8_t out[8], const struct winsize *w)
{
    put_le16(out, w->ws_row);
    put_le16(out + 2, w->ws_col);
    put_le16(out + 4, w->ws_xpixel);
    put_le16(out + 6, w->ws_ypixel);
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

static int encode_x11(const struct x11_display *x, struct buf *out)
{
    uint8_t raw[4 + sizeof x->cookie];
    if (!x->wanted)
        return 0;
    put_le32(raw, x->number);
    memcpy(raw + 4, x->cookie, sizeof x->cookie);
    return tlv_put(out, TAG_DISPLAY, raw, sizeof raw);
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
    if (rc == 0)
        rc = encode_x11(&s->x11, out);
    if (rc == 0 && s->step != NULL)
        rc = tlv_put_str(out, TAG_STEP, s->step);
    if (rc == 0 && s->attach != NULL)
        rc = tlv_put_str(out, TAG_ATTACH, s->attach);
    if (rc == 0 && out->len > VHPC_MESSAGE_MAX)
        rc = -EMSGSIZE;
    return rc;
}
