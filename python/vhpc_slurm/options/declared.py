# SPDX-License-Identifier: Apache-2.0
"""The options --vhpc-* of sbatch, salloc and srun: each is declared here or in ``saving``, and only there."""

from __future__ import annotations

from enum import StrEnum

from vhpc_slurm.options.grammars import (
    Choice,
    ClusterName,
    Count,
    Directory,
    Disk,
    File,
    Image,
    Mounts,
    Size,
    Together,
    Variables,
    Words,
)
from vhpc_slurm.options.option import Limit, Option
from vhpc_slurm.options.saving import CHECKPOINT, RESUME, SAVE

MAX_GUESTS_PER_NODE = 64
MAX_VFS = 256
"""Virtual functions on a node: what GUIDs distinguish on a rail."""
MAX_TIMEOUT_S = 3600
"""Also the limit of guests.boot_timeout_s."""
MIN_DISK_MIB = 64
MAX_SIZE_MIB = 1 << 24
"""Of sizes on a node: 16 TiB."""


class BatchPlace(StrEnum):
    """Where the batch script runs; srun tasks run in guests either way."""

    GUEST = "guest"
    HOST = "host"


IMAGE = Option(
    "image",
    Image(),
    "[own/]NAME[:TAG][@DIGEST]|SOURCE",
    usage="run the job inside KVM guests of this image on its nodes",
    detail=(
        "Run the batch script and each task of the job inside KVM guests. On each node of the job, guests "
        "are booted from the image NAME for this job alone, and removed when the job ends. The default of "
        "TAG is latest. All nodes boot the same bytes: the name is resolved to a digest once, when the job "
        "starts; sacct shows the digest in AdminComment. NAME@sha256:DIGEST is the image of that digest, "
        "whatever the name points to when the job starts. own/NAME is an image of the user's own catalogue, "
        "if the site has such catalogues. SOURCE is docker://NAME or KIND:PATH with a slash in the path, as "
        "for `vhpc image import`: it is imported into the user's own catalogue before the job is created, "
        "unless it is there already, and the job gets the digest of the result. The word list in place of a "
        "name prints the names of the images that the user may use here, and no job is created; an image of "
        "this name is list:latest. Within a job the option may be repeated for a step, but only with the "
        "job's own image; a step without it runs in the guests too."
    ),
)

MEM_RESERVE = Option(
    "mem-reserve",
    Size(1, MAX_SIZE_MIB, "--vhpc-mem-reserve=2G"),
    "SIZE",
    usage="memory of the job kept on the host side of each node [KMGT] (default unit: M)",
    detail=(
        "Memory on each node that is taken from the job's allocation for the host side: the virtual machine "
        "monitor, file sharing, and the batch script with --vhpc-batch=host. The guests get the rest. A "
        "whole number with the suffix K, M, G or T; without suffix it is MiB, as for --mem. Parts of a MiB "
        "are rounded up. The site sets the default and may set a minimum."
    ),
    fields=("mem_reserve_mib",),
    plan="as sbatch --vhpc-mem-reserve",
)

BATCH = Option(
    "batch",
    Choice(BatchPlace),
    "guest|host",
    usage="where the batch script runs; srun's tasks run in guests either way",
    detail=(
        "guest (the default) runs the batch script, or salloc's interactive shell, in the guest of the "
        "job's first node. host leaves it on the node itself, and only the tasks that srun starts go into "
        "the guests."
    ),
    fields=("batch",),
    limit=Limit("batch", "it does not permit the batch script on the {asked} (use --vhpc-batch={first})"),
    reported=True,
)

TIMEOUT = Option(
    "timeout",
    Count(1, MAX_TIMEOUT_S, "seconds"),
    "SECONDS",
    usage="how long a guest may take to boot before the job fails",
    detail=(
        "Longest time from the start of a guest until its agent is ready, in seconds, 1 to 3600. If a guest "
        "takes longer, the job fails with one line on its stderr. The site sets the default and an upper "
        "limit."
    ),
    fields=("timeout_s",),
    limit=Limit(
        "max_timeout_s",
        "it permits a boot of {most} s, the job asks for {asked} s (--vhpc-timeout={most} or less)",
    ),
)

CONSOLE = Option(
    "console",
    File(1024),
    "PATH",
    usage="file that gets the guests' console output",
    detail=(
        "File that receives the console output of the guests when they end, written as the user. A relative "
        "path is relative to the job's working directory. At most 1024 bytes of UTF-8 without control "
        "characters. The file is created when the job starts; if that fails, a line on the job's standard "
        "error says so and the job continues. Failures at the end are in the AdminComment that sacct shows."
    ),
    fields=("console",),
)

VFS = Option(
    "vfs",
    Count(0, MAX_VFS),
    "N",
    usage="virtual functions of network adapters for the guests of each node",
    detail=(
        "Virtual functions of the node's InfiniBand or Ethernet adapters for the guests of each node; those "
        "nearest to their GPUs and cores are used. If the site has Slurm count them as a generic resource, "
        "--gres asks for them and this option can only ask for fewer; with 0 the guests get none."
    ),
    fields=("vfs",),
    limit=Limit(
        "max_vfs",
        "it permits {most} virtual functions on a node, the job asks for {asked} (ask for fewer)",
    ),
    plan="number of virtual functions",
)

GUESTS_PER_NODE = Option(
    "guests-per-node",
    Count(1, MAX_GUESTS_PER_NODE),
    "N",
    usage="how many guests each node of the job has; its cores, memory and devices are divided",
    detail=(
        "Guests on each node, 1 to 64; the default is 1. The job's cores on a node are divided among them "
        "as evenly as whole cores can be, each guest within a NUMA cell where possible, and its memory, "
        "GPUs and virtual functions likewise. The batch script runs in the first guest of the first node. "
        "Of the N tasks that a step has on a node with K guests, the task with the local id I "
        "(SLURM_LOCALID) runs in guest I*K/N, rounded down: tasks fill the guests in blocks, in their "
        "order. A guest is called NODE-g0, NODE-g1 and so on, and a task sees those of its step's GPUs that "
        "its own guest has. All guests of a job start, or none."
    ),
    fields=("guests_per_node",),
    limit=Limit(
        "max_guests_per_node",
        "it permits {most} guests on a node, the job asks for {asked} "
        "(--vhpc-guests-per-node={most} or less)",
    ),
    plan="number of guests",
    reported=True,
)

NETWORK = Option(
    "network",
    Words(
        ("job", "multicast", "nat", "site"),
        (
            Together(
                ("multicast",), ("job",), "multicast is for the network of 'job': 'job,multicast' is expected"
            ),
            Together(
                ("nat", "site"), (), "nat and site both lead to other networks: one of them is expected"
            ),
        ),
        "job,nat",
    ),
    "none|LIST",
    usage="which network the guests of the job have",
    detail=(
        "none, or a list of words with commas between them. job gives each guest an interface (vhpc0) on a "
        "network that only the guests of this job are on. They reach each other by their host names, over "
        "IPv4 and IPv6; VHPC_NODELIST has the names of all of them, with commas between them. Nothing else "
        "can be reached through it, and broadcasts reach only the guests of the same node. multicast, "
        "beside job: broadcast and multicast frames of a guest reach all guests of the job, for programs "
        "that find each other in this way; the site limits the number of guests. nat gives each guest an "
        "interface (nat0) by which its programs open TCP and UDP connections over IPv4 to networks outside "
        "of the site, and to those that the site has chosen, with the address of the node; no host can "
        "connect to the guest. site gives each guest an interface (site0) on a network that the site has "
        "made for guests, and that guests of other jobs and users are on too; not together with nat. none: "
        "the guests have no network. The site sets the default and which of them are allowed; a job that "
        "asks for another fails with one line on its stderr."
    ),
    fields=("network",),
    limit=Limit("networks", "it does not permit network {asked} (choose by --vhpc-network: {permitted})"),
)

CLUSTER = Option(
    "cluster",
    ClusterName(),
    "[ACCOUNT/]NAME[:keep]",
    usage="one private network for all running jobs of yours, or of an account, with this name",
    detail=(
        "The guests of all running jobs of the user with the same NAME are on one private network: they "
        "reach each other over IPv4 and IPv6, by names and by ssh. With ACCOUNT/NAME they are those of all "
        "users of the job's account, if the policy of the site permits it; ssh leads only to guests of jobs "
        "of the same user. A guest is called HOSTNAME-jJOBID there, as in n1-j1234, beside its name in its "
        "own job. The first job makes the cluster, others join it when they start, and it ends with the "
        "last one; with :keep its name stays until it is removed by `vhpc cluster rm`, or as long as the "
        "policy permits. So Dask, Ray or Spark grow by workers that are jobs of their own, and shrink by "
        "their end. Without --vhpc-network the option implies job. Not with multicast, --vhpc-checkpoint "
        "or --vhpc-resume, nor where the site encrypts job networks."
    ),
    fields=("cluster",),
    reported=True,
)

DISK = Option(
    "disk",
    Disk(MIN_DISK_MIB, MAX_SIZE_MIB, "--vhpc-disk=20G or --vhpc-disk=20G:/local"),
    "SIZE[:/MOUNT/POINT]",
    usage=(
        "disk of each guest, for what the job writes outside of shared folders or at the mount point only "
        "[KMGT] (default unit: M)"
    ),
    detail=(
        "Size of a disk that each guest gets on the storage of its node. With a size alone, what the job "
        "writes outside of shared folders (/tmp, /var, installed packages) goes to this disk; without the "
        "option it goes to memory of the guest, half of it at most. With a mount point, as in 20G:/local, "
        "the disk is mounted at this directory, and only what the job writes there goes to it. The "
        "directory is made if the image lacks it, belongs to the user with mode 0700 (/tmp and /var/tmp: to "
        "root, with mode 1777), and what the image has there cannot be seen. The mount point is an absolute "
        "path of letters, digits and the characters / . _ + -, at most 255, without . or .. as a part. It "
        "cannot be /, /var or /var/lib, nor on or below /bin, /boot, /dev, /etc, /home, /lib*, /proc, /run, "
        "/sbin, /sys or /usr, nor above, on or below the home or a shared folder. The space is reserved "
        "when the job starts and free again when it ends; then the disk and all files on it are gone. A "
        "whole number with the suffix K, M, G or T; without suffix it is MiB, as for --mem. At least 64 "
        "MiB. The site sets the largest size, and may give no disks."
    ),
    fields=("disk_mib", "disk_mount"),
    limit=Limit(
        "max_disk_mib",
        "it permits disks up to {most} MiB, the job asks for {asked} (--vhpc-disk={most}M or less)",
        none="it permits no disks (submit the job without --vhpc-disk)",
    ),
    plan="as sbatch --vhpc-disk",
    reported=True,
)

SHARES = Option(
    "shares",
    Words(("home", "work_dir", "site"), (), "work_dir,site"),
    "none|LIST",
    usage="which folders of the hosts the guests have; without it: all that the site shares",
    detail=(
        "none, or a list of words with commas between them: home is the home of the user, work_dir the "
        "working directory of the job, site all other folders that the site shares. Without the option, "
        "guests have all of them, as far as the site and its policy share them. Without home, files of "
        "the user's home such as .bashrc and .local have no effect in guests, and the directory belongs "
        "to the guest. A program whose working directory is not in the guest starts in /tmp. Programs "
        "of a guest can submit jobs that have other folders."
    ),
    fields=("shares",),
    plan="as sbatch --vhpc-shares",
    reported=True,
)

MOUNT = Option(
    "mount",
    Mounts(1024),
    "SRC:DST[:ro]",
    usage="folders of shares that guests also have at other places; with commas between them",
    detail=(
        "The guests have the folder SRC at the directory DST, too. SRC is in a folder that guests have, "
        "such as the home (see --vhpc-shares), and is opened with the user's rights when the guest boots. "
        "With :ro nothing can be written by way of DST. DST is made if the image lacks it; links of the "
        "image are followed. Both are absolute paths without . or .. as a part; SRC has no commas or "
        "colons; DST has letters, digits and the characters / . _ + -, at most 255, and what the image has "
        "there cannot be seen. DST cannot be /, /var or /var/lib, nor on or below /bin, /boot, /dev, /etc, "
        "/home, /lib*, /proc, /run, /sbin, /sys or /usr, nor above, on or below a shared folder or another "
        "DST. Up to 16 folders, and 1024 bytes; of several options the last one counts. If a folder cannot "
        "be mounted, the job fails with one line."
    ),
    fields=("mounts",),
    plan="as sbatch --vhpc-mount",
    reported=True,
)

ENV = Option(
    "env",
    Variables(1024),
    "NAME[=VALUE]",
    usage="variables for the programs of the guests; with commas between them",
    detail=(
        "Variables that programs have in the guests. They replace those of the submission, of the site and "
        "of the image where a program enters the guests; what a script sets afterwards stays, also in its "
        "steps. NAME without a value keeps that of the submission, if there is one, against that of the "
        "image. NAME has letters, digits and _, and is none of the variables that say which job this is: "
        "HOME, LOGNAME, OLDPWD, PWD, USER, PMI*, SLURM*, VHPC_*. VALUE has no commas. At most 1024 bytes; "
        "of several options the last one counts."
    ),
    fields=("env",),
    plan="as sbatch --vhpc-env",
    reported=True,
)

WORKDIR = Option(
    "workdir",
    Directory(1024),
    "DIR",
    usage="directory of the guest in which the job's programs start",
    detail=(
        "Directory of the guest in which the batch script starts, and each task that is not started from "
        "within a guest. It is an absolute path, and the user can enter it in the guest; else the program "
        "does not start, with one line. Without the option it is the working directory of the job. Output "
        "files of Slurm are where they are without it. At most 1024 bytes of UTF-8 without control "
        "characters."
    ),
    fields=("start_dir",),
    plan="as sbatch --vhpc-workdir",
    reported=True,
)

ENVIRONMENT = Option(
    "environment",
    File(1024),
    "FILE",
    usage="a file with these options, which a group can share; see: vhpc environment --help",
    detail=(
        "A file with options, as a table of TOML: its keys are the names of the options in this list without "
        "--vhpc-, such as image, mount or guests-per-node. A value is a string as on the command line; a "
        "number may be a number, a list an array of strings, and env a table, as in env.OMP_PLACES = "
        '"cores". An option of the command line or of #SBATCH wins over its variable, and this over the '
        "file. The file is read when the job is submitted, with the rights of the user; a relative path "
        "begins at the working directory of the command. `vhpc environment FILE` prints the options, or the "
        "line that is wrong. At most 64 KiB."
    ),
    fields=("environment",),
    plan="as sbatch --vhpc-environment",
    reported=True,
)

OPTIONS = (
    IMAGE,
    MEM_RESERVE,
    BATCH,
    TIMEOUT,
    CONSOLE,
    VFS,
    GUESTS_PER_NODE,
    NETWORK,
    CLUSTER,
    DISK,
    SHARES,
    MOUNT,
    ENV,
    WORKDIR,
    SAVE,
    CHECKPOINT,
    RESUME,
    ENVIRONMENT,
)
"""In the order of --help and of the manual."""
