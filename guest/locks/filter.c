/* SPDX-License-Identifier: Apache-2.0 */
/* Decision: Locks of a guest are taken on the node */
#include "filter.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "readtext.h"

/* Little endian: the low half of an argument comes first. */
#define LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
/* Continue `yes` or `no` instructions behind the next one. */
#define EQUAL(value, yes, no) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (value), (yes), (no))

int filter_install(void)
{
    static struct sock_filter code[] = {
        LOAD(arch),
        EQUAL(FILTER_ARCH, 0, 3),
        LOAD(nr),
        EQUAL(SYS_flock, 16, 0),
        EQUAL(SYS_fcntl, 5, 14),
        EQUAL(AUDIT_ARCH_I386, 0, 13),
        LOAD(nr),
        EQUAL(FILTER_FLOCK_I386, 12, 0),
        EQUAL(FILTER_FCNTL_I386, 1, 0),
        EQUAL(FILTER_FCNTL64_I386, 0, 9),
        LOAD(args[1]),
        EQUAL(F_GETLK, 8, 0),
        EQUAL(F_SETLK, 7, 0),
        EQUAL(F_SETLKW, 6, 0),
        EQUAL(F_OFD_GETLK, 5, 0),
        EQUAL(F_OFD_SETLK, 4, 0),
        EQUAL(F_OFD_SETLKW, 3, 0),
        BPF_STMT(BPF_ALU | BPF_SUB | BPF_K, F_GETLK_I386),
        BPF_JUMP(BPF_JMP | BPF_JGT | BPF_K, F_SETLKW_I386 - F_GETLK_I386, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF),
    };
    const struct sock_fprog program = {.len = sizeof code / sizeof code[0], .filter = code};
    struct seccomp_notif_sizes sizes;
    struct utsname u;
    uint64_t major, minor;
    if (syscall(SYS_seccomp, SECCOMP_GET_NOTIF_SIZES, 0, &sizes) < 0)
        return -errno;
    if (sizes.seccomp_notif > sizeof(struct seccomp_notif) + 64 ||
        sizes.seccomp_notif_resp > sizeof(struct seccomp_notif_resp) + 64)
        return -ENOSYS;
    const char *release = u.release;
    if (uname(&u) < 0 || !text_number(&release, 10, '.', &major) ||
        !text_number(&release, 10, '\0', &minor) || major * 1000 + minor < 5005)
        return -ENOSYS;
    /* Without SPEC_ALLOW kernels before 5.16 slow down all programs for the sake of the filter. */
    long fd = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER,
                      SECCOMP_FILTER_FLAG_NEW_LISTENER | SECCOMP_FILTER_FLAG_SPEC_ALLOW, &program);
    return fd < 0 ? -errno : (int)fd;
}
