/* SPDX-License-Identifier: Apache-2.0 */
#include "files.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sysmacros.h>

#include "readtext.h"

struct locked_file *files_find(struct locked_files *f, dev_t device, ino_t inode)
{
    for (size_t i = 0; i < f->used; i++)
        if (f->file[i].used && f->file[i].inode == inode && f->file[i].device == device)
            return &f->file[i];
    return NULL;
}

struct locked_file *files_add(struct locked_files *f, dev_t device, ino_t inode, const char *tag,
                              const char *path)
{
    size_t at = 0;
    while (at < f->used && f->file[at].used)
        at++;
    if (at == LOCKS_FILES)
        return NULL;
    struct locked_file *l = &f->file[at];
    *l = (struct locked_file){
        .device = device, .inode = inode, .tag = strdup(tag), .path = strdup(path)};
    l->used = l->tag != NULL && l->path != NULL;
    if (!l->used) {
        free(l->tag);
        free(l->path);
        return NULL;
    }
    if (at == f->used)
        f->used++;
    return l;
}

static struct locks_request request(const struct locked_files *f, const struct locked_file *l,
                                    uint8_t op)
{
    return (struct locks_request){.op = op, .file = (uint32_t)(l - f->file), .inode = l->inode};
}

static void drop(struct locked_files *f, struct locked_file *l)
{
    struct locks_request r = request(f, l, LOCKS_CLOSE);
    struct locks_reply reply;
    (void)node_ask(&f->node, &r, &reply);
    for (size_t kind = 0; kind < LOCKS_KINDS; kind++) {
        locks_map_free(&l->held[kind]);
        locks_map_free(&l->needed[kind]);
    }
    free(l->tag);
    free(l->path);
    *l = (struct locked_file){0};
    while (f->used > 0 && !f->file[f->used - 1].used)
        f->used--;
}

/* Set a range on the node, whose bytes have one mode there. */
static int set(struct locked_files *f, struct locked_file *l, uint8_t kind, struct locks_range r)
{
    struct locks_request ask = request(f, l, LOCKS_SET);
    struct locks_reply reply;
    ask.kind = kind;
    ask.mode = r.mode;
    ask.start = r.start;
    ask.end = r.end;
    ask.tag = l->tag;
    ask.path = l->path;
    int rc = node_ask(&f->node, &ask, &reply);
    if (rc < 0)
        return -ENOLCK;
    if (kind == LOCKS_FLOCK)
        r.mode = reply.mode;
    else if (reply.error != 0)
        return -(int)reply.error;
    if (locks_map_set(&l->held[kind], r) < 0) {
        ask.mode = LOCKS_FREE; /* what is not noted would never be released */
        (void)node_ask(&f->node, &ask, &reply);
        return -ENOLCK;
    }
    return -(int)reply.error;
}

int files_raise(struct locked_files *f, struct locked_file *l, uint8_t kind, struct locks_range r,
                bool *asked)
{
    for (uint64_t at = r.start;;) {
        struct locks_range part = locks_map_next(&l->held[kind], at, r.end);
        if (part.mode < r.mode) {
            *asked = true;
            int rc = set(f, l, kind, (struct locks_range){part.start, part.end, r.mode});
            if (rc < 0)
                return rc;
        }
        if (part.end == r.end)
            return 0;
        at = part.end + 1;
    }
}

int files_test(struct locked_files *f, struct locked_file *l, struct locks_range r,
               struct locks_range *other)
{
    struct locks_request ask = request(f, l, LOCKS_TEST);
    struct locks_reply reply;
    ask.mode = r.mode;
    ask.start = r.start;
    ask.end = r.end;
    ask.tag = l->tag;
    ask.path = l->path;
    if (node_ask(&f->node, &ask, &reply) < 0)
        return -ENOLCK;
    *other = (struct locks_range){reply.start, reply.end, reply.mode};
    return -(int)reply.error;
}

void files_hold_nothing(struct locked_files *f)
{
    for (size_t i = 0; i < f->used; i++)
        for (size_t kind = 0; kind < LOCKS_KINDS; kind++)
            f->file[i].held[kind].count = 0;
}

void files_need_nothing(struct locked_files *f)
{
    for (size_t i = 0; i < f->used; i++)
        for (size_t kind = 0; kind < LOCKS_KINDS; kind++)
            f->file[i].needed[kind].count = 0;
}

/* "1: POSIX  ADVISORY  WRITE 812 00:2d:1234 0 EOF"; those that wait have "->" behind the number. */
static int need_line(struct locked_files *f, const char *line)
{
    char class[16], mode[16], word[32];
    uint64_t major, minor, inode;
    struct locks_range r = {.end = LOCKS_END};
    if (!text_word(&line, word, sizeof word) || !text_word(&line, class, sizeof class) ||
        !text_word(&line, word, sizeof word) || !text_word(&line, mode, sizeof mode) ||
        !text_word(&line, word, sizeof word) || !text_number(&line, 16, ':', &major) ||
        !text_number(&line, 16, ':', &minor) || !text_number(&line, 10, ' ', &inode) ||
        !text_number(&line, 10, ' ', &r.start))
        return 0;
    if (!text_number(&line, 10, '\0', &r.end) && strncmp(line, "EOF", 3) != 0)
        return 0;
    bool flock = strcmp(class, "FLOCK") == 0;
    if (!flock && strcmp(class, "POSIX") != 0 && strcmp(class, "OFDLCK") != 0)
        return 0;
    struct locked_file *l = files_find(f, makedev((unsigned)major, (unsigned)minor), (ino_t)inode);
    if (l == NULL)
        return 0;
    r.mode = strcmp(mode, "WRITE") == 0 ? LOCKS_EXCLUSIVE : LOCKS_SHARED;
    if (r.start > r.end || r.end > LOCKS_END)
        return 0;
    return locks_map_raise(&l->needed[flock ? LOCKS_FLOCK : LOCKS_FCNTL], r);
}

int files_need_locks(struct locked_files *f, const char *name)
{
    FILE *file = fopen(name, "re");
    char *line = NULL;
    size_t size = 0;
    int rc = 0;
    if (file == NULL)
        return -errno;
    while (rc == 0 && getline(&line, &size, file) > 0)
        rc = need_line(f, line);
    if (rc == 0 && ferror(file))
        rc = -EIO;
    free(line);
    (void)fclose(file);
    return rc;
}

/* True if a mode on the node has changed. */
static bool settle(struct locked_files *f, struct locked_file *l, uint8_t kind)
{
    bool changed = false;
    for (uint64_t at = 0;;) {
        struct locks_range held = locks_map_next(&l->held[kind], at, LOCKS_END);
        struct locks_range needed = locks_map_next(&l->needed[kind], at, held.end);
        if (needed.mode != held.mode)
            changed = set(f, l, kind, needed) == 0 || changed;
        if (needed.end == LOCKS_END)
            return changed;
        at = needed.end + 1;
    }
}

bool files_settle(struct locked_files *f, long long now)
{
    enum { IDLE_MS = 1000 };
    bool changed = false;
    for (size_t i = 0; i < f->used; i++) {
        struct locked_file *l = &f->file[i];
        if (!l->used)
            continue;
        size_t ranges = 0;
        for (size_t kind = 0; kind < LOCKS_KINDS; kind++) {
            changed = settle(f, l, (uint8_t)kind) || changed;
            ranges += l->held[kind].count + l->needed[kind].count;
        }
        if (ranges > 0)
            l->idle_ms = 0;
        else if (l->idle_ms == 0)
            l->idle_ms = now;
        else if (now - l->idle_ms > IDLE_MS)
            drop(f, l);
    }
    return changed;
}
