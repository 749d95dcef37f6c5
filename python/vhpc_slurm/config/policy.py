# SPDX-License-Identifier: Apache-2.0
"""The tables [[policy]] of vhpc.toml: what jobs of a partition, an account, a QOS or a user may do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from vhpc_slurm.config.disks import hidden
from vhpc_slurm.config.network import NetworkChoice
from vhpc_slurm.config.setting import documented
from vhpc_slurm.options import (
    BY_FIELD,
    DISK,
    MAX_GUESTS_PER_NODE,
    MAX_SIZE_MIB,
    MAX_TIMEOUT_S,
    MAX_VFS,
    MIN_DISK_MIB,
    OPTIONS,
    Option,
    mount_point_refusal,
)

if TYPE_CHECKING:
    from vhpc_slurm.config import Config

ShareKind = Literal["home", "work_dir", "site"]
"""Keys of [shares] whose folders guests see."""
Place = Literal["guest", "host"]
"""Values of --vhpc-batch."""
GuestCount = Annotated[int, msgspec.Meta(ge=1, le=MAX_GUESTS_PER_NODE)]
DiskMib = Annotated[int, msgspec.Meta(ge=MIN_DISK_MIB, le=MAX_SIZE_MIB)]
MostDiskMib = Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE_MIB)]
VfCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_VFS)]
CheckpointMib = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
ClusterGuests = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
KeptDays = Annotated[int, msgspec.Meta(ge=0, le=3650)]
BootSeconds = Annotated[int, msgspec.Meta(ge=1, le=MAX_TIMEOUT_S)]


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The first rule whose conditions all hold for a job applies to it; later rules do not.

    Conditions are partitions, accounts, qos and users. A job for which no rule holds may do
    what the other tables permit. Texts are patterns of fnmatch(3): `*` stands for any text.

    The keys `max_...` lower limits of the site and cannot raise them. The keys `default_...` are
    for jobs without the option. Of all rules whose conditions hold, the first one that
    sets such a key gives the value, unless the rule that applies does not permit it.
    """

    name: Annotated[
        str, documented("name of the rule, for messages to users", pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]*$")
    ]
    partitions: Annotated[tuple[str, ...], documented("partitions of Slurm; empty: all")] = ()
    accounts: Annotated[
        tuple[str, ...],
        documented("accounts of Slurm; empty: all. Slurm checks them only if it enforces associations"),
    ] = ()
    qos: Annotated[tuple[str, ...], documented("QOS of Slurm; empty: all")] = ()
    users: Annotated[tuple[str, ...], documented("users; empty: all")] = ()
    images: Annotated[
        tuple[str, ...],
        documented(
            'permitted images, as [own/]NAME:TAG; empty: none. "*" includes images of users\' own, '
            '"[!o]*" and "debian-*" do not'
        ),
    ] = ("*",)
    signers: Annotated[
        tuple[str, ...],
        documented(
            "an image needs a signature of one of these principals of images.allowed_signers; empty: no "
            "signature is needed"
        ),
    ] = ()
    networks: Annotated[
        tuple[Literal["none", "job", "multicast", "nat", "site"], ...],
        documented("permitted words of --vhpc-network and of network.default"),
    ] = ("none", "job", "multicast", "nat", "site")
    shares: Annotated[
        tuple[ShareKind, ...], documented("folders of [shares] that guests see, of those set there")
    ] = ("home", "work_dir", "site")
    batch: Annotated[
        tuple[Place, ...],
        documented("permitted values of --vhpc-batch; host leaves the batch script on the node itself"),
        msgspec.Meta(min_length=1),
    ] = ("guest", "host")
    account_clusters: Annotated[
        Literal["none", "join", "create"],
        documented(
            "whether jobs may be in clusters of their account, by --vhpc-cluster=ACCOUNT/NAME. Users of the "
            "account share such a network. join: if the cluster exists; create: they make, keep and remove "
            "it, too. Without a rule they may not. vhpcd asks slurmctld for the accounts of the user"
        ),
    ] = "none"
    max_cluster_guests: Annotated[
        ClusterGuests | None,
        documented(
            "a job does not join a cluster that would have more guests with it; absent: as many as "
            "network.ipv4 has addresses"
        ),
    ] = None
    max_cluster_kept_days: Annotated[
        KeptDays | None,
        documented(
            "how long a cluster without jobs is kept at most, by :keep or vhpc cluster create; 0: not at "
            "all; absent: until it is removed"
        ),
    ] = None
    max_guests_per_node: Annotated[
        GuestCount | None,
        documented("largest --vhpc-guests-per-node; absent: 64"),
    ] = None
    max_disk_mib: Annotated[
        MostDiskMib | None,
        documented("largest disk of a guest, in MiB; 0: no disks; absent: disks.max_mib"),
    ] = None
    max_vfs: Annotated[
        VfCount | None,
        documented(
            "largest number of virtual functions for the guests of a node, by --vhpc-vfs or --gres; "
            "absent: no limit"
        ),
    ] = None
    max_timeout_s: Annotated[
        BootSeconds | None,
        documented("largest --vhpc-timeout, in seconds; absent: what guests.boot_timeout_max_s permits"),
    ] = None
    max_checkpoint_user_mib: Annotated[
        CheckpointMib | None,
        documented(
            "a job is not saved if all checkpoints of its user would have more than so many MiB; 0: no "
            "checkpoints; absent: no limit"
        ),
    ] = None
    max_checkpoint_account_mib: Annotated[
        CheckpointMib | None,
        documented(
            "the same for all checkpoints of the job's account; jobs without an account have no such limit"
        ),
    ] = None
    default_network: Annotated[
        NetworkChoice | None, documented("--vhpc-network for jobs without it; absent: network.default")
    ] = None
    default_disk_mib: Annotated[
        DiskMib | None,
        documented("size of each guest's disk, in MiB, for jobs without --vhpc-disk; absent: no disk"),
    ] = None
    default_disk_mount: Annotated[
        str | None,
        documented(
            "directory at which the disk of default_disk_mib is mounted, as by --vhpc-disk=SIZE:DIRECTORY; "
            "absent: the disk takes the changes to the root. Jobs with a shared folder above, on or below it "
            "fail, unless they have --vhpc-disk"
        ),
    ] = None
    default_batch: Annotated[
        Place | None,
        documented("--vhpc-batch for jobs without it and without --vhpc-save; absent: guest"),
    ] = None
    default_guests_per_node: Annotated[
        GuestCount | None,
        documented("--vhpc-guests-per-node for jobs without it; absent: 1"),
    ] = None


LIMITED = tuple(
    option
    for key in Rule.__struct_fields__
    for option in OPTIONS
    if option.limit is not None and option.limit.key == key
)
"""Options that rules limit, in the order of the rules' keys."""
DEFAULTED = tuple(
    option
    for key in Rule.__struct_fields__
    for option in BY_FIELD.values()
    if key == f"default_{option.field}"
)
"""Options that rules set for jobs without them, in the order of the rules' keys."""


def check_rules(config: Config) -> None:
    """ValueError, which names the rule, when a rule cannot be applied, or contradicts itself or the site."""
    names = [rule.name for rule in config.policy]
    for rule in config.policy:
        if names.count(rule.name) > 1:
            raise ValueError(f"several rules of policy have the name {rule.name!r}")
        if rule.signers and not config.images.allowed_signers:
            raise ValueError(f"policy rule {rule.name!r} has signers: set images.allowed_signers")
        _check_limits(config, rule)
        _check_defaults(config, rule)


def _check_limits(config: Config, rule: Rule) -> None:
    longest = config.guests.longest_boot_s(0)
    for key, site, most in (
        ("max_disk_mib", "disks.max_mib", config.disks.max_mib),
        ("max_timeout_s", "guests.boot_timeout_max_s", longest),
    ):
        own = getattr(rule, key)
        if own is not None and own > most:
            raise ValueError(
                f"policy rule {rule.name!r} has {key} = {own}, and the site permits {most} ({site}): "
                "a rule can only lower a limit"
            )


def _check_defaults(config: Config, rule: Rule) -> None:
    start = f"policy rule {rule.name!r} has"
    for option in DEFAULTED:
        _check_default(config, rule, option)
    if rule.default_network is not None:
        site = (*config.network.allowed, *(("multicast",) if config.network.multicast_guests else ()))
        if missing := [word for word in rule.default_network.split(",") if word not in site]:
            raise ValueError(
                f"{start} default_network = {rule.default_network!r}, but {missing[0]} is not in "
                "network.allowed"
            )
    if "guest" not in rule.batch and rule.default_batch is None:
        raise ValueError(f"{start} batch without guest: set its default_batch to host")
    _check_mount(config, rule)


def _check_default(config: Config, rule: Rule, option: Option) -> None:
    """ValueError if a rule does not permit its own default of an option."""
    key = f"default_{option.field}"
    value = getattr(rule, key)
    if value is None or option.limit is None:
        return
    start, permitted = f"policy rule {rule.name!r} has {key} = ", getattr(rule, option.limit.key)
    if isinstance(permitted, tuple):
        if missing := [word for word in value.split(",") if word not in permitted]:
            raise ValueError(f"{start}{value!r}, but {missing[0]} is not in its {option.limit.key}")
        return
    most = config.disks.max_mib if permitted is None and option is DISK else permitted
    if most is not None and value > most:
        raise ValueError(f"{start}{value}, but permits {most}{' MiB' if key.endswith('_mib') else ''}")


def _check_mount(config: Config, rule: Rule) -> None:
    mount = rule.default_disk_mount
    if mount is None:
        return
    start = f"policy rule {rule.name!r} has default_disk_mount = {mount!r}"
    if rule.default_disk_mib is None:
        raise ValueError(f"{start}, but no default_disk_mib")
    if why := mount_point_refusal(mount):
        raise ValueError(f"{start}: {why}")
    if folder := hidden(mount, config.shares.site):
        raise ValueError(f"{start}, but guests have the shared folder {folder} (shares.site)")
