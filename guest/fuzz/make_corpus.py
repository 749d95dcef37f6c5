#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write the seed corpus: small, valid conversations, and some with one fault.

usage: make_corpus.py [DIR]   (default: corpus/ in the folder of this file)

The numbers are those of docs/guest-protocol.md, written down again here on
purpose: the seeds do not follow the C headers when these go wrong.
"""

import struct
import sys
from pathlib import Path

HELLO, REQUEST, REPLY, EXEC, STARTED, DATA, EOF, CREDIT = range(1, 9)
SIGNAL, WINSIZE, EXIT, ERROR, CLOSE, PING, PONG = range(9, 16)
SYNC = 18
MORE, READER = 1, 2


def frame(
    kind: int, payload: bytes = b"", *, fd: int = 0, flags: int = 0, session: int = 1, call: int = 0
) -> bytes:
    """One frame, header and payload."""
    return struct.pack("<IBBHII", len(payload), kind, fd, flags, session, call) + payload


def field(tag: int, value: int | bytes) -> bytes:
    """One field of a structured payload."""
    data = struct.pack("<I", value) if isinstance(value, int) else value
    return struct.pack("<HHI", tag, 0, len(data)) + data


def exec_fields(*more: bytes) -> bytes:
    """The least an EXEC holds, and more."""
    return (
        field(16, bytes([0, 1, 1, 2, 2, 2]))
        + field(17, 0)
        + field(18, 0)
        + field(20, b"true")
        + b"".join(more)
    )


VERSIONS = field(1, 1) + field(2, 1)
STARTED_1 = frame(STARTED, field(32, 7))

FROM_GUEST = {
    "hello": frame(HELLO, VERSIONS, session=0),
    "output": STARTED_1 + frame(DATA, b"hi\n", fd=1) + frame(EOF, fd=1) + frame(EXIT, field(33, 0)),
    "killed": STARTED_1 + frame(EXIT, field(34, 9) + field(35, 0)),
    "not-found": frame(ERROR, field(38, 1) + field(36, 2) + field(37, b"execve(): x")),
    "reader-gone": STARTED_1 + frame(EOF, fd=0, flags=READER) + frame(DATA, b"x", fd=2),
    "reply": frame(REPLY, field(49, 1) + field(36, 0), session=2),
    "reply-parts": frame(REPLY, b"abc", session=2, flags=MORE) + frame(REPLY, b"def", session=2),
    "host-call": STARTED_1
    + frame(EXEC, exec_fields(), call=1)
    + frame(SIGNAL, struct.pack("<I", 15), call=1)
    + frame(CLOSE, call=1),
    "host-call-parts": STARTED_1
    + frame(EXEC, exec_fields(), call=1, flags=MORE)
    + frame(EXEC, field(21, b"A=B"), call=1),
    "host-call-script": STARTED_1
    + frame(
        EXEC,
        exec_fields(field(20, b"job.sh"), field(28, b"/x/job.sh"), field(29, b"#!/bin/sh\n"), field(90, 1)),
        call=1,
    ),
    "killed-for-memory": STARTED_1
    + frame(EXIT, field(34, 9) + field(35, 0) + field(138, struct.pack("<Q", 2))),
    "usage": frame(
        REPLY,
        field(49, 1)
        + field(36, 0)
        + field(65, 1 << 20)
        + field(128, field(131, struct.pack("<Q", 3_071_234)) + field(134, struct.pack("<Q", 104_857_600)))
        + field(128, field(129, b"0") + field(130, 2) + field(131, struct.pack("<Q", 2**64 - 1))),
        session=2,
    ),
    "flood": STARTED_1 + b"".join(frame(DATA, bytes(1000), fd=1) for _ in range(20)),
    # large enough for shared memory
    "large": STARTED_1 + frame(DATA, bytes(16384), fd=1) + frame(EXIT, field(33, 0)),
    "large-cut": STARTED_1 + frame(DATA, bytes(16384), fd=1)[:2000],
    "credit-too-much": STARTED_1 + frame(CREDIT, struct.pack("<I", 1), fd=0),
    "sync": STARTED_1 + frame(DATA, b"hi\n", fd=1) + frame(SYNC, fd=1) + frame(SYNC, fd=1) + frame(EOF, fd=1),
    "sync-early": frame(SYNC, fd=1),
    "sync-undeclared": STARTED_1 + frame(SYNC, fd=5),
    "unknown-session": frame(DATA, b"x", session=99),
}

CLUSTER = (
    field(48, 39)
    + field(49, 15)
    + field(151, b"exam")
    + field(153, 1234)
    + field(53, 2001)
    + field(
        152,
        field(50, b"n1-j1234")
        + field(153, 1234)
        + field(79, b"10.200.0.1")
        + field(80, b"fd76:6870:6300::1")
        + field(65, 4),
    )
    + field(154, b"ssh-ed25519 AAAA")
    + field(155, b"ssh-ed25519 BBBB")
)
TTY = field(26, struct.pack("<HHHH", 24, 80, 0, 0))
FROM_HOST = {
    "hello": frame(HELLO, VERSIONS, session=0),
    "ping": frame(PING, b"12345678"),
    "exec": frame(EXEC, exec_fields(field(21, b"PATH=/bin"), field(22, b"/"), field(23, 18))),
    "exec-parts": frame(EXEC, exec_fields(), flags=MORE) + frame(EXEC, field(21, b"A=B")),
    "exec-tty": frame(EXEC, exec_fields(TTY)) + frame(WINSIZE, struct.pack("<HHHH", 1, 2, 3, 4)),
    "exec-limits": frame(
        EXEC,
        exec_fields(field(24, struct.pack("<IQQ", 7, 1024, 2**64 - 1)), field(25, 5), field(19, bytes(8))),
    ),
    "exec-script": frame(EXEC, exec_fields(field(28, b"/x/y"), field(29, b"#!/bin/sh\n"))),
    "exec-affinity": frame(EXEC, exec_fields(field(91, b"\x02\x01"))),
    "exec-operand": frame(EXEC, exec_fields(field(20, b"x"), field(90, 1))),
    "exec-operand-late": frame(EXEC, exec_fields(field(90, 1))),
    "exec-two-uids": frame(EXEC, exec_fields(field(17, 0))),
    "exec-step": frame(EXEC, exec_fields(field(129, b"0"))),
    "exec-two-steps": frame(EXEC, exec_fields(field(129, b"0"), field(129, b"1"))),
    "exec-attach": frame(EXEC, exec_fields(field(147, b"batch"))),
    "exec-attach-twice": frame(EXEC, exec_fields(field(147, b"batch"), field(147, b"batch"))),
    "sync": frame(EXEC, exec_fields()) + frame(SYNC, fd=1),
    "hold": frame(REQUEST, field(48, 35) + field(49, 12) + field(70, 1000)),
    "release": frame(REQUEST, field(48, 36) + field(49, 13)),
    "resume": frame(REQUEST, field(48, 37) + field(49, 14) + field(148, struct.pack("<Q", 18 * 10**17))),
    "usage": frame(REQUEST, field(48, 24) + field(49, 11)),
    "exec-close": frame(EXEC, exec_fields()) + frame(CLOSE),
    "identity": frame(
        REQUEST,
        field(48, 1)
        + field(49, 1)
        + field(50, b"n1")
        + field(51, b"10.0.0.1 n1")
        + field(52, b"alice")
        + field(53, 2001)
        + field(54, 2001)
        + field(55, b"")
        + field(56, b"/home/alice")
        + field(57, b"/bin/sh")
        + field(58, struct.pack("<I", 2001) + b"alice")
        + field(59, b"Europe/Berlin")
        + field(60, b"srun"),
    ),
    "mount": frame(
        REQUEST, field(48, 2) + field(49, 2) + field(61, b"home") + field(62, b"/home/alice") + field(63, 1)
    ),
    "fabric": frame(
        REQUEST,
        field(48, 6)
        + field(49, 4)
        + field(68, 0x9000)
        + field(68, 0x7FFF)
        + field(69, struct.pack("<Q", 0x02CC100000000000))
        + field(70, 1000),
    ),
    "fabric-address": frame(
        REQUEST,
        field(48, 6) + field(68, 0x9000) + field(69, bytes(range(1, 9))) + field(72, b"10.128.0.1/12"),
    ),
    "topology": frame(REQUEST, field(48, 7) + field(49, 5) + field(74, b'<system version="1"/>')),
    "environment": frame(
        REQUEST, field(48, 34) + field(49, 7) + field(21, b"SET=1") + field(21, b"KEPT") + field(22, b"/work")
    ),
    "network": frame(
        REQUEST,
        field(48, 8)
        + field(49, 6)
        + field(77, bytes.fromhex("060013880000"))
        + field(73, b"vhpc0")
        + field(78, 1450)
        + field(79, b"10.200.0.1/16")
        + field(80, b"fd76:6870:6300::1/64")
        + field(81, b"n1,n2")
        + field(83, struct.pack("<I", 4) + b"n1")
        + field(83, struct.pack("<I", 4) + b"n2"),
    ),
    "nat": frame(
        REQUEST,
        field(48, 16)
        + field(49, 10)
        + field(77, bytes.fromhex("027668706302"))
        + field(73, b"nat0")
        + field(78, 65520)
        + field(79, b"10.201.0.2/24")
        + field(112, b"10.201.0.1")
        + field(113, b"192.0.2.53")
        + field(113, b"192.0.2.54"),
    ),
    "network-no-host": frame(REQUEST, field(48, 8) + field(83, struct.pack("<I", 0) + b"n1")),
    "ssh": frame(
        REQUEST,
        field(48, 10)
        + field(49, 9)
        + field(53, 2001)
        + field(54, 2001)
        + field(84, b"-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----\n")
        + field(85, b"ssh-ed25519 AAAA")
        + field(86, b"-----BEGIN OPENSSH PRIVATE KEY-----\nBBBB\n-----END OPENSSH PRIVATE KEY-----\n")
        + field(87, b"ssh-ed25519 BBBB"),
    ),
    "cluster": frame(REQUEST, CLUSTER),
    "cluster-parts": frame(REQUEST, CLUSTER[:90], flags=MORE) + frame(REQUEST, CLUSTER[90:]),
    "cluster-no-address": frame(
        REQUEST, field(48, 39) + field(151, b"exam") + field(152, field(50, b"n1") + field(79, b"10.200"))
    ),
    "exec-after-cluster": frame(REQUEST, CLUSTER)
    + frame(EXEC, exec_fields(field(21, b"VHPC_CLUSTER_NAME=other")), session=2),
    "exec-pmi": frame(EXEC, exec_fields(field(21, b"PMI_FD=3"), field(75, b"no network"), field(96, 1))),
    "exec-pmix": frame(
        EXEC,
        exec_fields(
            field(21, b"PMIX_SERVER_URI41=s.1;tcp4://127.0.0.1:4711"),
            field(21, b"PMIX_SERVER_URI2=s.1"),
            field(75, b"no network"),
            field(97, 1),
        ),
    ),
    "exec-x11": frame(EXEC, exec_fields(field(98, struct.pack("<I", 25) + bytes(16)))),
    "exec-x11-no-port": frame(EXEC, exec_fields(field(98, struct.pack("<I", 65535) + bytes(16)))),
    "exec-after-network": frame(
        REQUEST,
        field(48, 8)
        + field(77, bytes.fromhex("060013880000"))
        + field(73, b"vhpc0")
        + field(78, 1450)
        + field(79, b"10.200.0.1/16")
        + field(80, b"fd76:6870:6300::1/64"),
    )
    + frame(EXEC, exec_fields(field(21, b"FI_TCP_IFACE=lo"), field(21, b"VHPC_INTERFACE=UCX_NET_DEVICES=x"))),
    "network-short-mac": frame(REQUEST, field(48, 8) + field(49, 7) + field(77, b"\x06\0\0")),
    "reach": frame(
        REQUEST,
        field(48, 9)
        + field(49, 8)
        + field(82, b"10.200.0.2")
        + field(82, b"fd76:6870:6300::2")
        + field(78, 1450)
        + field(70, 1000),
    ),
    "reach-no-address": frame(REQUEST, field(48, 9) + field(82, b"n2") + field(78, 1450)),
    "exec-topology": frame(EXEC, exec_fields(field(21, b"NCCL_TOPO_FILE=/nonexistent/topology"))),
    "exec-fabric": frame(
        EXEC,
        exec_fields(
            field(21, b"NCCL_IB_PKEY=1"),
            field(21, b"UCX_IB_PKEY=0x1000"),
            field(21, b"VHPC_FABRIC=NCCL_IB_PKEY=1 UCX_IB_PKEY=0x1001  UCX_NET_DEVICES="),
        ),
    ),
    "info": frame(REQUEST, field(48, 5) + field(49, 3)),
    "request-parts": frame(REQUEST, field(48, 5), flags=MORE) + frame(REQUEST, field(49, 3)),
    "call-late": frame(EXEC, exec_fields()) + frame(STARTED, call=1),
}

INIT_2 = b"cmd=response_to_init rc=0 pmi_version=2 pmi_subversion=0\n"
# Tasks - 1, guests - 1, size of pieces - 1; then what slurmstepd says.
PMI = {
    "lines": bytes([3, 1, 4]) + b"cmd=get_result rc=0 value=(vector,(0,2,2))\ncmd=barrier_out rc=0\n",
    "messages": bytes([3, 1, 2]) + INIT_2 + b"55    cmd=kvs-get-response;found=TRUE;value=(vector,(0,1,4));",
    "mapping": bytes([7, 2, 0]) + b"(vector,(0,2,1),(0,1,2),(1,1,4))",
    "no-length": bytes([0, 0, 9]) + INIT_2 + b"-12   cmd=x;",
    "requests-1": bytes([0, 0, 7])
    + b"cmd=init pmi_version=1 pmi_subversion=1\ncmd=put kvsname=1.1 key=a value=b\ncmd=barrier_in\n" * 2,
    "requests-2": bytes([0, 0, 5])
    + b"cmd=init pmi_version=2 pmi_subversion=0\n    14cmd=kvs-fence;26    cmd=kvs-put;key=a;value=b;" * 2,
}


def pmix(tag: int, content: bytes) -> bytes:
    """One message of PMIx."""
    return struct.pack(">IIII", 0, tag, len(content), 0) + content


NAME = b"\x24slurm.pmix.1009.2\0"
WHO = b"native\0" + bytes(5) + NAME[1:] + bytes(4) + b"5.0.7\0v41\0\1hash\0"
GREETING = b"\xff" * 8 + struct.pack("<II", len(WHO), 0) + WHO
# Size of pieces - 1, length of what the program says / 4; then what it says, and what its server says.
PMIX = {
    name: bytes([piece, len(program) // 4]) + program + bytes(-len(program) % 4) + server
    for name, piece, program, server in (
        ("greeting", 200, GREETING, bytes(8)),
        ("raw", 3, b"hello", b"world"),
        (
            "get",
            16,
            GREETING + pmix(101, b"\2\4\2" + NAME + b"\2\3"),
            bytes(8) + pmix(101, b"\2\0\2\x15\2" + NAME + b"\3"),
        ),
        (
            "told",
            255,
            GREETING + pmix(102, b"\2\2\2\1") + pmix(103, b"\2\x0d\2\0") + pmix(104, b"\2\x0e"),
            bytes(8) + pmix(102, b"\2\0") + pmix(103, b"\2\0") + pmix(0xFFFFFFFE, b"\2\0"),
        ),
        ("long", 40, GREETING + struct.pack(">IIII", 0, 101, 1 << 30, 0), bytes(12)),
    )
}


def lock(
    op: int, kind: int = 0, mode: int = 0, *, file: int = 0, inode: int = 0, text: bytes = b"home0\0.\0"
) -> bytes:
    """One request to vhpc-locks for bytes 1 to 5; the inode can hardly be that of a file."""
    length = 40 + len(text)
    return struct.pack("<IIBBBBIQQQ", length, 9, op, kind, mode, 0, file, inode, 1, 5) + text


LOCKS = {
    "hello": lock(1, file=1, text=b""),
    "set": lock(2, 0, 2) + lock(2, 1, 1, text=b"home0\0passwd\0") + lock(3, 0, 1) + lock(4, text=b""),
    "outside": lock(2, text=b"home0\0../etc/passwd\0") + lock(2, text=b"site1\0.\0"),
    "one-text": lock(2, text=b"home0\0"),
    "file-number": lock(4, file=4096, text=b""),
    "reply": struct.pack("<IIIIQQ", 45, 1, 0, 0, 0, 0) + b"cluster home0",
    "mounts": b"30 21 0:40 /a\\040b /home/alice rw,nosuid shared:1 - virtiofs home0 rw\n"
    b"31 30 0:41 / /home/alice/sub rw - virtiofs none rw\n21 21 0:42 / / rw - virtiofs none rw\n",
    "table": b"1: POSIX  ADVISORY  WRITE 812 00:2d:77 0 EOF\n1: -> FLOCK  ADVISORY  READ 812 00:2d:77 0 EOF\n"
    b"2: FLOCK  ADVISORY  READ 812 00:2d:77 0 EOF\n3: OFDLCK ADVISORY  READ -1 00:2d:77 10 19\n",
}

IMAGE_ENVIRONMENTS = {
    "good": b"1PATH=/opt/bin:/bin\n# a comment\n\nGREETING=hello world\n",
    "list": b"0my.conf=/etc/x\0F%%=() {\n}\0",
    "of-the-job": b"1HOME=/root\nSLURM_JOB_ID=1\nVHPC_RANK=2\nPMI_FD=3",
    "twice": b"1A=1\nA=2\n",
    "no-name": b"1=x\n",
}


def authority(family: int, address: bytes, number: bytes, data: bytes = bytes(16)) -> bytes:
    """One entry of an authority file of X11, for the host n1 and display 25 if they are named so."""
    fields = (address, number, b"MIT-MAGIC-COOKIE-1", data)
    return struct.pack(">H", family) + b"".join(struct.pack(">H", len(text)) + text for text in fields)


AUTHORITIES = {
    "local": authority(256, b"login", b"25") + authority(256, b"n1", b"25"),
    "wild": authority(65535, b"", b""),
    "cut": authority(256, b"n1", b"25")[:-1],
    "short": authority(256, b"n1", b"25", b"x"),
    "display": b"localhost:25.0",
    "socket": b"12: " + b"0" * 24 + b"01000000:1791 " + b"0" * 32 + b":0000 0A 0:0 00:0 0 2001 0 81 1",
}

F_HELLO, F_OPEN, F_OPENED, F_DATA, F_EOF, F_CREDIT, F_CLOSE = range(1, 8)


def forward_frame(kind: int, channel: int, payload: bytes = b"") -> bytes:
    """One frame of `vhpc forward`."""
    return struct.pack("<BBHI", kind, 0, len(payload), channel) + payload + b"\n"


FORWARDS = {
    "one": forward_frame(F_OPEN, 1) + forward_frame(F_DATA, 1, b"GET /\n") + forward_frame(F_EOF, 1),
    "credit": forward_frame(F_OPEN, 2) + forward_frame(F_CREDIT, 2, struct.pack("<I", 5)),
    "refused": forward_frame(F_OPEN, 5) + forward_frame(F_CLOSE, 5, struct.pack("<I", 104)),
    "many": b"".join(forward_frame(F_OPEN, n) + forward_frame(F_DATA, n, bytes(500)) for n in range(1, 9)),
    "flood": forward_frame(F_OPEN, 1) + forward_frame(F_DATA, 1, bytes(16384)) * 3,
}


def main() -> None:
    """Write every seed to its folder."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "corpus"
    for side, seeds in (
        ("forward", FORWARDS),
        ("guest", FROM_GUEST),
        ("host", FROM_HOST),
        ("imageenv", IMAGE_ENVIRONMENTS),
        ("pmi", PMI),
        ("pmix", PMIX),
        ("locks", LOCKS),
        ("xauth", AUTHORITIES),
    ):
        folder = root / side
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in seeds.items():
            (folder / name).write_bytes(data)


if __name__ == "__main__":
    main()
