/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Numbers of the guest channel; docs/guest-protocol.md defines them. Python has the same in the
 * node library's wire.py; tests/unit/rules/test_shared_constants.py compares them.
 *
 * One protocol runs on three connections: vhpc-run (or root's control client) to vhpc-shim over a
 * unix socket, vhpc-shim to vhpc-agent over virtio-serial, and, in the guest, command client to
 * vhpc-agent over a unix socket.
 */
#ifndef VHPC_PROTOCOL_H
#define VHPC_PROTOCOL_H

#include <stdint.h>

#define VHPC_PROTOCOL_MIN 1u
#define VHPC_PROTOCOL_MAX 1u

#define VHPC_PORT_NAME "org.vhpc.agent.0"
#define VHPC_CALL_SOCKET "/run/vhpc/call.sock"
/* argv[0] of host calls that are connections to the PMIx server of the step. */
#define VHPC_CALL_PMIX "pmix"
/* ... to the X11 display that Slurm forwards to the node. */
#define VHPC_CALL_X11 "x11"
/* In the guest: the end of the value of XAUTHORITY; the display's number is %u. */
#define VHPC_X11_FOLDER "x11.%u"
#define VHPC_X11_FILE "Xauthority"
/*
 * Variable with the working directory of a step's tasks, or of salloc's command, if only the guest
 * that srun or salloc was called in has it.
 */
#define VHPC_CWD_VARIABLE "VHPC_CWD"
/*
 * Variable of an srun that can be issued again after a checkpoint, and of its tasks (steps.h). srun
 * passes on variables that begin with SLURM_ whatever --export says.
 */
#define VHPC_CALL_VARIABLE "SLURM_VHPC_CALL"
/* In the guest: the value of NCCL_TOPO_FILE. */
#define VHPC_TOPOLOGY_FILE "/run/vhpc/nccl-topology.xml"
/* In the guest: values of variables of the same names. */
#define VHPC_HOSTFILE "/run/vhpc/hostfile"
#define VHPC_MACHINEFILE "/run/vhpc/machinefile"
/* In the guest: lists of the guests of its cluster. */
#define VHPC_CLUSTER_FOLDER "/run/vhpc/cluster"

enum {
    VHPC_HEADER = 16,             /* bytes of a frame header */
    VHPC_PAYLOAD_MAX = 256 << 10, /* bytes of payload in one frame */
    VHPC_MESSAGE_MAX = 8 << 20,   /* bytes of a message sent as several frames */
    VHPC_WINDOW = 1 << 20,        /* bytes that a sender may have on the way, per lane */
    VHPC_FDS_MAX = 8,             /* file descriptors 0..7 of a task can be relayed */
    VHPC_CALLS_MAX = 32,          /* host calls at a time in one session */
    VHPC_CLIENTS_MAX = 2048,      /* sessions at a time in one guest: a task for each CPU */
    VHPC_X11_PORT = 6000,         /* TCP port of display 0 */
    VHPC_PENDING_MAX = 16,        /* unanswered REQUESTs, and PINGs, of one client */
    VHPC_WATCH_MS =
        10000, /* after SIGTSTP, for this long silence means that vhpc-run was stopped */
};

enum vhpc_type {
    VHPC_HELLO = 1,
    VHPC_REQUEST = 2,
    VHPC_REPLY = 3,
    VHPC_EXEC = 4,
    VHPC_STARTED = 5,
    VHPC_DATA = 6,
    VHPC_EOF = 7,
    VHPC_CREDIT = 8,
    VHPC_SIGNAL = 9,
    VHPC_WINSIZE = 10,
    VHPC_EXIT = 11,
    VHPC_ERROR = 12,
    VHPC_CLOSE = 13,
    VHPC_PING = 14,
    VHPC_PONG = 15,
    VHPC_SHARE = 16,
    VHPC_SHARED = 17,
    VHPC_SYNC = 18,
    VHPC_TYPE_LAST = VHPC_SYNC,
};

enum vhpc_flag {
    VHPC_MORE = 1, /* the message continues in the next frame of this session and call */
    VHPC_READER =
        2, /* on EOF: the sender reads no more from this fd (without it: it writes no more) */
    VHPC_FLAGS_ALL = VHPC_MORE | VHPC_READER,
};

enum vhpc_tag {
    TAG_VERSION_MIN = 1,
    TAG_VERSION_MAX = 2,
    TAG_AGENT_VERSION = 3,
    TAG_BOOT_ID = 4,
    TAG_KERNEL = 5,
    TAG_STATE = 6,
    TAG_SHARES = 7,

    TAG_FDS = 16,
    TAG_UID = 17,
    TAG_GID = 18,
    TAG_GROUPS = 19,
    TAG_ARG = 20,
    TAG_ENV = 21,
    TAG_CWD = 22,
    TAG_UMASK = 23,
    TAG_RLIMIT = 24,
    TAG_NICE = 25,
    TAG_TTY = 26,
    TAG_TERMIOS = 27,
    TAG_SCRIPT_PATH = 28,
    TAG_SCRIPT_DATA = 29,
    TAG_JOINED = 30,
    TAG_TTY_OUT = 31,

    TAG_PID = 32,
    TAG_EXIT_CODE = 33,
    TAG_EXIT_SIGNAL = 34,
    TAG_CORE = 35,
    TAG_ERRNO = 36,
    TAG_TEXT = 37,
    TAG_KIND = 38,

    TAG_OP = 48,
    TAG_REQUEST_ID = 49,
    TAG_HOSTNAME = 50,
    TAG_HOSTS_LINE = 51,
    TAG_USER_NAME = 52,
    TAG_USER_UID = 53,
    TAG_USER_GID = 54,
    TAG_USER_GECOS = 55,
    TAG_USER_HOME = 56,
    TAG_USER_SHELL = 57,
    TAG_GROUP = 58,
    TAG_TIMEZONE = 59,
    TAG_COMMAND = 60,
    TAG_MOUNT_TAG = 61,
    TAG_MOUNT_PATH = 62,
    TAG_READ_ONLY = 63,
    TAG_UPTIME_MS = 64,
    TAG_CPUS = 65,
    TAG_MEMORY_KIB = 66,
    TAG_SESSIONS = 67,
    TAG_KEY = 68,
    TAG_PORT_GUID = 69,
    TAG_WAIT_MS = 70,
    TAG_PORT = 71,
    TAG_ADDRESS = 72,
    TAG_INTERFACE = 73,
    TAG_TOPOLOGY = 74,
    TAG_PMI_REFUSAL = 75,
    TAG_SIGNAL_GROUP = 76,
    TAG_MAC = 77,
    TAG_MTU = 78,
    TAG_IPV4 = 79,
    TAG_IPV6 = 80,
    TAG_NODELIST = 81,
    TAG_TARGET = 82,
    TAG_HOST = 83,
    TAG_HOST_KEY = 84,
    TAG_HOST_PUBLIC = 85,
    TAG_USER_KEY = 86,
    TAG_USER_PUBLIC = 87,
    TAG_ZONE_DATA = 88,
    TAG_MOUNT_SOURCE = 89,
    TAG_PMI_NETWORK = 96,
    TAG_PMIX = 97,
    TAG_DISPLAY = 98,
    TAG_OPERAND = 90,
    TAG_AFFINITY = 91,
    TAG_GATEWAY = 112,
    TAG_NAMESERVER = 113,

    TAG_USAGE = 128,
    TAG_STEP = 129,
    TAG_TASKS = 130,
    TAG_CPU_US = 131,
    TAG_USER_US = 132,
    TAG_SYSTEM_US = 133,
    TAG_PEAK_BYTES = 134,
    TAG_RSS_BYTES = 135,
    TAG_READ_BYTES = 136,
    TAG_WRITTEN_BYTES = 137,
    TAG_OOM_KILLS = 138,
    TAG_GPU = 139,
    TAG_GPU_ADDRESS = 140,
    TAG_BUSY_E4 = 141,
    TAG_MEMORY_BYTES = 142,
    TAG_POWER_MW = 143,
    TAG_GPU_MISSING = 144,
    TAG_LOCKS = 145,
    TAG_EMULATED = 146,
    TAG_ATTACH = 147,
    TAG_TIME_NS = 148,
    TAG_HOLD = 149,
    TAG_PMI_TOLD = 150,
    TAG_CLUSTER = 151,
    TAG_GUEST = 152,
    TAG_JOB = 153,
    TAG_MEMBER_HOST_KEY = 154,
    TAG_MEMBER_USER_KEY = 155,
};

/* TAG_STATE in a HELLO from the shim to a client */
enum { VHPC_STATE_BOOTING = 0, VHPC_STATE_UP = 1 };

/* TAG_KIND of an ERROR */
enum vhpc_error_kind {
    VHPC_ERR_EXEC = 1,     /* the program could not be executed; errno is execve's */
    VHPC_ERR_REFUSED = 2,  /* the peer may not do this */
    VHPC_ERR_GONE = 3,     /* the guest is gone */
    VHPC_ERR_INTERNAL = 4, /* the peer has failed: memory, processes, limits */
};

/* TAG_OP of a REQUEST */
enum vhpc_op {
    VHPC_OP_IDENTITY = 1,
    VHPC_OP_MOUNT = 2,
    VHPC_OP_READY = 3,
    VHPC_OP_POWEROFF = 4,
    VHPC_OP_INFO = 5,
    VHPC_OP_FABRIC = 6,
    VHPC_OP_TOPOLOGY = 7,
    VHPC_OP_NETWORK = 8,
    VHPC_OP_REACH = 9,
    VHPC_OP_SSH = 10,
    VHPC_OP_NAT = 16,
    VHPC_OP_USAGE = 24,
    VHPC_OP_DISK = 32,
    VHPC_OP_BIND = 33,
    VHPC_OP_ENVIRONMENT = 34,
    VHPC_OP_HOLD = 35,
    VHPC_OP_RELEASE = 36,
    VHPC_OP_RESUME = 37,
    VHPC_OP_PREPARE = 38,
    VHPC_OP_CLUSTER = 39,
};

/* fd of a SIGNAL frame: to the main process, or to the others of its process group */
enum vhpc_signal_to { VHPC_TO_MAIN = 0, VHPC_TO_GROUP = 1 };

/* Direction of a relayed fd, from the program's point of view: bits of TAG_FDS */
enum { VHPC_FD_IN = 1, VHPC_FD_OUT = 2, VHPC_FD_BOTH = 3 };

#endif
