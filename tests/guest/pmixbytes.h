/* SPDX-License-Identifier: Apache-2.0 */
/* Messages between Open MPI 5.0.7 and Slurm 24.11.5 with PMIx 5.0.7, captured on a node. */
#ifndef PMIXBYTES_H
#define PMIXBYTES_H

#define HEADER(tag, length)                                                                        \
    "\0\0\0\1"                                                                                     \
    "\0\0\0" tag "\0\0\0" length "\0\0\0\0"
#define NOBODY "\xff\xff\xff\xff\xff\xff\xff\xff"
/* The length of the content is in the byte order of the machine, a little-endian one. */
#define GREETING(length, nspace)                                                                   \
    NOBODY length "\0\0\0"                                                                         \
                  "\0\0\0\0"                                                                       \
                  "native\0"                                                                       \
                  "\0\0\0\x08"                                                                     \
                  "\xd1\x07\0\0\xd1\x07\0\0"                                                       \
                  "\0" nspace "\0"                                                                 \
                  "\0\0\0\0"                                                                       \
                  "5.0.7a1\0"                                                                      \
                  "v41\0"                                                                          \
                  "\1"                                                                             \
                  "hash\0"
#define GREETED                                                                                    \
    "\0\0\0\0"                                                                                     \
    "\0\0\0\1"
#define REGISTER HEADER("\x66", "\6") "\2\r\2\0\2\0"
#define DEREGISTER HEADER("\x73", "\x0a") "\2\x0e\2\x8f\3\2\xa3\6\2\r"
#define COMMIT                                                                                     \
    HEADER("\x6a", "\x30")                                                                         \
    "\2\2\2\1\2\1\x1c\2\x1apml.base.2.0\0\x1b\4ob1\0"                                              \
    "\2$slurm.pmix.1009.2\0"
#define GOOD(tag) HEADER(tag, "\2") "\2\0"
#define GET(length, text)                                                                          \
    HEADER("\x70", length)                                                                         \
    "\2\4\2" text "\0"                                                                             \
    "\2\3\2\0\2\x18"                                                                               \
    "btl.tcp.5.0\0"
#define CARD                                                                                       \
    "\2\x18"                                                                                       \
    "btl.tcp.5.0\0"                                                                                \
    "\x1b \n\xc8\0\2\0\0\0\0\0\0\0\0\0\0\0\0\2\0\0\0\x10\0\0\0d\0\0\0\4"                           \
    "\0\0\0"
#define GOT(length, size, text) HEADER("\x70", length) "\2\0\2" size "\2" text "\0\3" CARD
#define FENCE(length, text) HEADER("\x72", length) "\2\3\2\1\2" text "\0\xfe\xff\xff\xff\x0f\2\0"
#define FINALIZE HEADER("\x74", "\2") "\2\5"

#endif
