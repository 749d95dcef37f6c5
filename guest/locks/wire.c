/* SPDX-License-Identifier: Apache-2.0 */
#include "wire.h"

#include <errno.h>
#include <stdbool.h>
#include <string.h>

#include "frame.h"

size_t locks_pack_request(uint8_t out[LOCKS_REQUEST + LOCKS_TEXT_MAX],
                          const struct locks_request *r)
{
    size_t tag = r->tag != NULL ? strlen(r->tag) + 1 : 0;
    size_t path = r->tag != NULL ? strlen(r->path) + 1 : 0;
    if (tag + path > LOCKS_TEXT_MAX)
        return 0;
    put_le32(out, (uint32_t)(LOCKS_REQUEST + tag + path));
    put_le32(out + 4, r->id);
    out[8] = r->op;
    out[9] = r->kind;
    out[10] = r->mode;
    out[11] = 0;
    put_le32(out + 12, r->file);
    put_le64(out + 16, r->inode);
    put_le64(out + 24, r->start);
    put_le64(out + 32, r->end);
    if (tag > 0) {
        memcpy(out + LOCKS_REQUEST, r->tag, tag);
        memcpy(out + LOCKS_REQUEST + tag, r->path, path);
    }
    return LOCKS_REQUEST + tag + path;
}

size_t locks_pack_reply(uint8_t out[LOCKS_REPLY + LOCKS_TEXT_MAX], const struct locks_reply *r)
{
    if (r->text_len > LOCKS_TEXT_MAX)
        return 0;
    put_le32(out, LOCKS_REPLY + r->text_len);
    put_le32(out + 4, r->id);
    put_le32(out + 8, r->error);
    put_le32(out + 12, r->mode);
    put_le64(out + 16, r->start);
    put_le64(out + 24, r->end);
    if (r->text_len > 0)
        memcpy(out + LOCKS_REPLY, r->text, r->text_len);
    return LOCKS_REPLY + r->text_len;
}

/* Length of a message that begins with it; 0: not complete. */
static int length_of(const uint8_t *in, size_t len, uint32_t header)
{
    if (len < header)
        return 0;
    uint32_t length = get_le32(in);
    if (length < header || length > header + LOCKS_TEXT_MAX)
        return -EPROTO;
    return len < length ? 0 : (int)length;
}

/* Two texts, each with its NUL, and nothing else. */
static bool read_texts(const char *text, size_t len, struct locks_request *r)
{
    const char *nul = memchr(text, '\0', len);
    size_t tag = nul != NULL ? (size_t)(nul - text) + 1 : len;
    if (tag == len || memchr(text + tag, '\0', len - tag) != text + len - 1)
        return false;
    r->tag = text;
    r->path = text + tag;
    return true;
}

static bool is_valid(const struct locks_request *r)
{
    if (r->op == LOCKS_HELLO)
        return r->tag == NULL;
    if (r->file >= LOCKS_FILES)
        return false;
    if (r->op == LOCKS_CLOSE)
        return r->tag == NULL;
    return (r->op == LOCKS_SET || r->op == LOCKS_TEST) && r->kind < LOCKS_KINDS &&
           r->mode <= LOCKS_EXCLUSIVE && r->start <= r->end && r->end <= LOCKS_END &&
           r->tag != NULL;
}

int locks_unpack_request(const uint8_t *in, size_t len, struct locks_request *r)
{
    int length = length_of(in, len, LOCKS_REQUEST);
    if (length <= 0)
        return length;
    *r = (struct locks_request){.id = get_le32(in + 4),
                                .op = in[8],
                                .kind = in[9],
                                .mode = in[10],
                                .file = get_le32(in + 12),
                                .inode = get_le64(in + 16),
                                .start = get_le64(in + 24),
                                .end = get_le64(in + 32)};
    size_t text = (size_t)length - LOCKS_REQUEST;
    if (in[11] != 0 || (text > 0 && !read_texts((const char *)in + LOCKS_REQUEST, text, r)))
        return -EPROTO;
    return is_valid(r) ? length : -EPROTO;
}

int locks_unpack_reply(const uint8_t *in, size_t len, struct locks_reply *r)
{
    int length = length_of(in, len, LOCKS_REPLY);
    if (length <= 0)
        return length;
    *r = (struct locks_reply){.id = get_le32(in + 4),
                              .error = get_le32(in + 8),
                              .mode = in[12],
                              .start = get_le64(in + 16),
                              .end = get_le64(in + 24),
                              .text = (const char *)in + LOCKS_REPLY,
                              .text_len = (uint32_t)length - LOCKS_REPLY};
    bool bad = get_le32(in + 12) > LOCKS_EXCLUSIVE || r->end > LOCKS_END || r->start > r->end;
    return bad ? -EPROTO : length;
}
