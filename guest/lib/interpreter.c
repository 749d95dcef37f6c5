/* SPDX-License-Identifier: Apache-2.0 */
#include "interpreter.h"

#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#include "readtext.h"

enum {
    SEGMENTS_MOST = 128, /* a program has about 15 */
    CHAIN_MOST = 5       /* interpreters of interpreters that Linux follows */
};

/* Copy what the file has at this offset, and end it with a NUL. False: the file ends before it. */
static bool read_name(int fd, uint64_t offset, char *name, size_t size)
{
    ssize_t n = pread(fd, name, size - 1, (off_t)offset);
    if (n <= 0)
        return false;
    name[n] = '\0';
    return true;
}

/* An ELF file of the other byte order gives nonsense here, and execve() ENOEXEC. */
static bool elf_interpreter(int fd, char *name, size_t size)
{
    union {
        unsigned char ident[EI_NIDENT];
        Elf32_Ehdr narrow;
        Elf64_Ehdr wide;
    } file;
    if (pread(fd, &file, sizeof file.wide, 0) != sizeof file.wide ||
        memcmp(file.ident, ELFMAG, SELFMAG) != 0)
        return false;
    bool wide = file.ident[EI_CLASS] == ELFCLASS64;
    unsigned count = wide ? file.wide.e_phnum : file.narrow.e_phnum;
    uint64_t at = wide ? file.wide.e_phoff : file.narrow.e_phoff;
    for (unsigned i = 0; i < count && i < SEGMENTS_MOST; i++) {
        union {
            Elf32_Word type; /* first in both */
            Elf32_Phdr narrow;
            Elf64_Phdr wide;
        } segment;
        size_t length = wide ? sizeof segment.wide : sizeof segment.narrow;
        if (pread(fd, &segment, length, (off_t)(at + i * length)) != (ssize_t)length)
            return false;
        if (segment.type == PT_INTERP)
            return read_name(fd, wide ? segment.wide.p_offset : segment.narrow.p_offset, name,
                             size);
    }
    return false;
}

enum interpreter_kind interpreter_of(int fd, char *name, size_t size)
{
    char begin[2];
    if (pread(fd, begin, sizeof begin, 0) != sizeof begin)
        return INTERPRETER_NONE;
    if (begin[0] == '#' && begin[1] == '!') {
        if (!read_name(fd, sizeof begin, name, size))
            return INTERPRETER_NONE;
        name[strcspn(name, "\n")] = '\0';
        return INTERPRETER_SCRIPT;
    }
    return elf_interpreter(fd, name, size) ? INTERPRETER_ELF : INTERPRETER_NONE;
}

static enum interpreter_kind look(const char *path, char *name, size_t size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO would keep us */
    if (fd < 0)
        return INTERPRETER_NONE;
    enum interpreter_kind kind = interpreter_of(fd, name, size);
    (void)close(fd);
    return kind;
}

bool interpreter_describe(const char *path, char *text, size_t size)
{
    char program[PATH_MAX], line[PATH_MAX], name[PATH_MAX];
    enum interpreter_kind kind = look(path, line, sizeof line);
    bool script = kind == INTERPRETER_SCRIPT;
    if (kind == INTERPRETER_NONE)
        return false;
    int length = script ? snprintf(text, size, "execve(): bad interpreter(%.255s): %s", line,
                                   strerror(ENOENT))
                        : snprintf(text, size, "execve(): %s: %s", path, strerror(ENOENT));
    if (length < 0 || (size_t)length >= size)
        return true;
    (void)snprintf(program, sizeof program, "%s", path);
    for (int i = 0; i < CHAIN_MOST && kind != INTERPRETER_NONE; i++) {
        const char *at = line;
        if (kind == INTERPRETER_ELF)
            memcpy(name, line, sizeof name);
        else if (!text_word(&at, name, sizeof name))
            break;
        if (access(name, F_OK) < 0 && errno == ENOENT) {
            bool said = script && i == 0; /* in slurmstepd's words */
            if (!said)
                (void)snprintf(text + length, size - (size_t)length,
                               " (%s needs %s, which is missing)", program, name);
            break;
        }
        memcpy(program, name, sizeof program);
        kind = look(program, line, sizeof line);
    }
    return true;
}
