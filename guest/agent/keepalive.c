/* SPDX-License-Identifier: Apache-2.0 */
/* Decision: TCP keepalive between guests */
#include "keepalive.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/bpf.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "ssh.h"

/* The program of the kernel, see bpf(2) and "BPF_PROG_TYPE_SOCK_OPS"; 64 instructions are
 * enough. */
enum {
    INSTRUCTIONS_MAX = 128,
    JUMPS_MAX = 32,
    WORDS_V6 = 4,
    VALUE = 0,   /* registers: R0 for values, */
    CONTEXT = 6, /* R6 for struct bpf_sock_ops, */
    IDLE = 7,    /* and three for the options; calls leave R6 to R9 alone */
    INTERVAL = 8,
    COUNT = 9,
    END = 1, /* where jumps lead */
    SET = 2,
    OTHER = 3,
    SSH = 4,
    CHOSEN = 5,
    KEY = -4, /* on the stack: of the map's only element, */
    ARGUMENT = -8,
};

const struct keepalive keepalive_patient = {.idle_s = 20, .interval_s = 10, .count = 4};
const struct keepalive keepalive_ssh = {.idle_s = 2, .interval_s = 1, .count = 5};

struct program {
    struct bpf_insn code[INSTRUCTIONS_MAX];
    uint32_t count;
    struct {
        uint32_t from;
        int to;
    } jump[JUMPS_MAX];
    uint32_t jumps;
};

static void put(struct program *p, int code, unsigned to, unsigned from, int offset, int32_t value)
{
    if (p->count < INSTRUCTIONS_MAX)
        p->code[p->count] = (struct bpf_insn){.code = (uint8_t)code,
                                              .dst_reg = to & 0xfU,
                                              .src_reg = from & 0xfU,
                                              .off = (int16_t)offset,
                                              .imm = value};
    p->count++;
}

/* The next instruction is a jump forwards, to where land() is called. */
static void note_jump(struct program *p, int to)
{
    if (p->jumps < JUMPS_MAX) {
        p->jump[p->jumps].from = p->count;
        p->jump[p->jumps].to = to;
    }
    p->jumps++;
}

/* Jump if the value equals (BPF_JEQ) or not (BPF_JNE). */
static void jump_if(struct program *p, int when, uint32_t value, int to)
{
    note_jump(p, to);
    put(p, BPF_JMP32 | when | BPF_K, VALUE, 0, 0, (int32_t)value);
}

static void jump(struct program *p, int to)
{
    note_jump(p, to);
    put(p, BPF_JMP | BPF_JA, 0, 0, 0, 0);
}

/* The jumps to this place. */
static void land(struct program *p, int here)
{
    for (uint32_t i = 0; i < p->jumps && i < JUMPS_MAX; i++)
        if (p->jump[i].to == here && p->jump[i].from < INSTRUCTIONS_MAX) {
            p->code[p->jump[i].from].off = (int16_t)(p->count - p->jump[i].from - 1);
            p->jump[i].to = 0;
        }
}

static void load(struct program *p, size_t offset)
{
    put(p, BPF_LDX | BPF_W | BPF_MEM, VALUE, CONTEXT, (int)offset, 0);
}

/* A word of the peer's address, in network byte order, is this one within the mask; or go. */
static void match(struct program *p, size_t offset, uint32_t word, uint32_t mask, int otherwise)
{
    if (mask == 0)
        return;
    load(p, offset);
    if (mask != UINT32_MAX)
        put(p, BPF_ALU | BPF_AND | BPF_K, VALUE, 0, 0, (int32_t)mask);
    jump_if(p, BPF_JNE, word & mask, otherwise);
}

static void move(struct program *p, unsigned to, int32_t value)
{
    put(p, BPF_ALU64 | BPF_MOV | BPF_K, to, 0, 0, value);
}

static void copy(struct program *p, unsigned to, unsigned from)
{
    put(p, BPF_ALU64 | BPF_MOV | BPF_X, to, from, 0, 0);
}

/* The value is in a register. */
static void set_option(struct program *p, int level, int name, unsigned value)
{
    put(p, BPF_STX | BPF_W | BPF_MEM, BPF_REG_10, value, ARGUMENT, 0);
    copy(p, BPF_REG_1, CONTEXT);
    move(p, BPF_REG_2, level);
    move(p, BPF_REG_3, name);
    copy(p, BPF_REG_4, BPF_REG_10);
    put(p, BPF_ALU64 | BPF_ADD | BPF_K, BPF_REG_4, 0, 0, ARGUMENT);
    move(p, BPF_REG_5, (int32_t)sizeof(int));
    put(p, BPF_JMP | BPF_CALL, 0, 0, 0, BPF_FUNC_setsockopt);
}

static void choose(struct program *p, const struct keepalive *k)
{
    move(p, IDLE, k->idle_s);
    move(p, INTERVAL, k->interval_s);
    move(p, COUNT, k->count);
}

/*
 * The element of the map is 1 after the first connection of ssh. R0 is its address, and is not
 * NULL, which the kernel wants to see checked.
 */
static void choose_by_ssh(struct program *p, int map)
{
    put(p, BPF_ST | BPF_W | BPF_MEM, BPF_REG_10, 0, KEY, 0);
    put(p, BPF_LD | BPF_DW | BPF_IMM, BPF_REG_1, BPF_PSEUDO_MAP_FD, 0, map);
    put(p, 0, 0, 0, 0, 0); /* the second half of the instruction before */
    copy(p, BPF_REG_2, BPF_REG_10);
    put(p, BPF_ALU64 | BPF_ADD | BPF_K, BPF_REG_2, 0, 0, KEY);
    put(p, BPF_JMP | BPF_CALL, 0, 0, 0, BPF_FUNC_map_lookup_elem);
    note_jump(p, END);
    put(p, BPF_JMP | BPF_JEQ | BPF_K, VALUE, 0, 0, 0);
    copy(p, BPF_REG_1, VALUE);
    load(p, offsetof(struct bpf_sock_ops, local_port)); /* in host byte order */
    jump_if(p, BPF_JEQ, SSH_PORT, SSH);
    load(p, offsetof(struct bpf_sock_ops, remote_port)); /* in network byte order */
    jump_if(p, BPF_JNE, htonl(SSH_PORT), OTHER);
    land(p, SSH);
    put(p, BPF_ST | BPF_W | BPF_MEM, BPF_REG_1, 0, 0, 1);
    land(p, OTHER);
    choose(p, &keepalive_ssh);
    put(p, BPF_LDX | BPF_W | BPF_MEM, VALUE, BPF_REG_1, 0, 0);
    jump_if(p, BPF_JEQ, 1, CHOSEN);
    choose(p, &keepalive_patient);
    land(p, CHOSEN);
}

static void set_options(struct program *p)
{
    move(p, VALUE, 1);
    set_option(p, SOL_SOCKET, SO_KEEPALIVE, VALUE);
    set_option(p, IPPROTO_TCP, TCP_KEEPIDLE, IDLE);
    set_option(p, IPPROTO_TCP, TCP_KEEPINTVL, INTERVAL);
    set_option(p, IPPROTO_TCP, TCP_KEEPCNT, COUNT);
}

/* The peer has an IPv4 address; that of a socket of IPv6 may be mapped (::ffff:A.B.C.D). */
static void peer_ipv4(struct program *p, const struct keepalive_network *n)
{
    match(p, offsetof(struct bpf_sock_ops, remote_ip4), n->ipv4.s_addr, n->mask.s_addr, END);
    jump(p, SET);
}

static void peer_ipv6(struct program *p, const struct keepalive_network *n)
{
    static const uint32_t mapped[WORDS_V6] = {0, 0, 0xffff, 0};
    const size_t word = offsetof(struct bpf_sock_ops, remote_ip6);
    if (n->prefix6 != 0) {
        for (size_t i = 0; i < WORDS_V6; i++) {
            uint32_t value,
                bits = n->prefix6 > 32 * (uint32_t)i ? n->prefix6 - 32 * (uint32_t)i : 0;
            uint32_t mask = bits >= 32 ? UINT32_MAX : bits == 0 ? 0 : UINT32_MAX << (32 - bits);
            memcpy(&value, &n->ipv6.s6_addr[4 * i], sizeof value);
            match(p, word + 4 * i, value, htonl(mask), OTHER);
        }
        jump(p, SET);
    }
    land(p, OTHER);
    for (size_t i = 0; i < WORDS_V6 - 1; i++)
        match(p, word + 4 * i, htonl(mapped[i]), UINT32_MAX, END);
    match(p, word + 12, n->ipv4.s_addr, n->mask.s_addr, END);
}

static void assemble(struct program *p, const struct keepalive_network *n, int map)
{
    copy(p, CONTEXT, BPF_REG_1);
    load(p, offsetof(struct bpf_sock_ops, op));
    jump_if(p, BPF_JEQ, BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB, OTHER);
    jump_if(p, BPF_JNE, BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB, END);
    land(p, OTHER);
    load(p, offsetof(struct bpf_sock_ops, family));
    jump_if(p, BPF_JNE, AF_INET, OTHER);
    peer_ipv4(p, n);
    land(p, OTHER);
    jump_if(p, BPF_JNE, AF_INET6, END);
    peer_ipv6(p, n);
    land(p, SET);
    choose_by_ssh(p, map);
    set_options(p);
    land(p, END);
    move(p, VALUE, 1);
    put(p, BPF_JMP | BPF_EXIT, 0, 0, 0, 0);
}

static int bpf(enum bpf_cmd command, union bpf_attr *attr)
{
    long rc = syscall(SYS_bpf, command, attr, sizeof *attr);
    return rc < 0 ? -errno : (int)rc;
}

static int make_map(void)
{
    union bpf_attr attr;
    memset(&attr, 0, sizeof attr);
    attr.map_type = BPF_MAP_TYPE_ARRAY;
    attr.key_size = sizeof(uint32_t);
    attr.value_size = sizeof(uint32_t);
    attr.max_entries = 1;
    return bpf(BPF_MAP_CREATE, &attr);
}

/* The descriptor of the loaded program, which holds the map; or -errno. */
static int load_program(const struct keepalive_network *n)
{
    static const char license[] = "Apache-2.0"; /* the kernel asks for one */
    struct program p = {0};
    union bpf_attr attr;
    int map = make_map();
    if (map < 0)
        return map;
    assemble(&p, n, map);
    memset(&attr, 0, sizeof attr);
    attr.prog_type = BPF_PROG_TYPE_SOCK_OPS;
    attr.insns = (uint64_t)(uintptr_t)p.code;
    attr.insn_cnt = p.count;
    attr.license = (uint64_t)(uintptr_t)license;
    bool fits = p.count <= INSTRUCTIONS_MAX && p.jumps <= JUMPS_MAX;
    int program = fits ? bpf(BPF_PROG_LOAD, &attr) : -E2BIG;
    (void)close(map);
    return program;
}

int keepalive_attach(const char *cgroup, const struct keepalive_network *n)
{
    union bpf_attr attr;
    int program = load_program(n);
    if (program < 0)
        return program;
    int folder = open(cgroup, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int rc = folder < 0 ? -errno : 0;
    if (rc == 0) {
        memset(&attr, 0, sizeof attr);
        attr.target_fd = (uint32_t)folder;
        attr.attach_bpf_fd = (uint32_t)program;
        attr.attach_type = BPF_CGROUP_SOCK_OPS;
        attr.attach_flags = BPF_F_ALLOW_MULTI; /* the image may have programs of its own */
        rc = bpf(BPF_PROG_ATTACH, &attr);
        (void)close(folder);
    }
    (void)close(program); /* the cgroup holds it */
    return rc;
}

void keepalive_apply(struct agent *a, const struct keepalive_network *n)
{
    char parent[4096];
    if (a->keepalive || a->cgroup == NULL ||
        (size_t)snprintf(parent, sizeof parent, "%s/..", a->cgroup) >= sizeof parent)
        return;
    /* Sessions are below this cgroup, and sshd of the agent is in it. */
    int rc = keepalive_attach(parent, n);
    a->keepalive = rc == 0;
    if (rc < 0)
        (void)fprintf(stderr, "vhpc-agent: no TCP keepalive on the job's network: %s\n",
                      strerror(-rc));
}
