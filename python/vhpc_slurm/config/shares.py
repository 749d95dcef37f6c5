# SPDX-License-Identifier: Apache-2.0
"""The table [shares] of vhpc.toml: every key of it, its meaning and its default."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, Literal

import msgspec

from vhpc_slurm.config.setting import documented

CachePolicy = Literal["auto", "always", "never"]
"""Values of virtiofsd's option --cache that vhpc uses."""
LockPolicy = Literal["cluster", "guest", "refuse"]
"""Where a lock of a program in a guest holds: on all hosts, in its guest alone, or nowhere (ENOLCK)."""


class Shares(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Folders of the host that guests see, through virtiofsd processes of the job user."""

    virtiofsd: Annotated[str, documented("virtiofsd binary (the Rust one)")] = "/usr/libexec/virtiofsd"
    home: Annotated[bool, documented("share the user's home")] = True
    work_dir: Annotated[
        bool, documented("share the job's working directory if no other share contains it")
    ] = True
    site: Annotated[
        tuple[str, ...], documented("additional folders that every guest sees, such as /scratch")
    ] = ()
    read_only: Annotated[tuple[str, ...], documented("folders of `site` that guests may only read")] = ()
    cache_always: Annotated[
        tuple[str, ...],
        documented(
            "folders of `read_only` whose files do not change while a job runs, such as a software tree: "
            "a guest keeps what it has read, and may not see a later change until it ends (virtiofsd's "
            "--cache=always)"
        ),
    ] = ()
    snapshots: Annotated[
        tuple[str, ...],
        documented(
            "folders of `read_only` that guests mount as a file system on a disk, with what `vhpc share "
            "snapshot` has found there last, instead of through virtiofsd: programs and Python packages "
            "start as fast as from the image. A folder without a snapshot, or an image whose root is not "
            "EROFS, gets virtiofsd"
        ),
    ] = ()
    cache_never: Annotated[
        tuple[str, ...],
        documented(
            "folders in which programs on several hosts change the same files at the same time: a guest "
            "asks the host each time (virtiofsd's --cache=never), and programs in guests cannot map "
            "files there with MAP_SHARED. It applies to all shares at or below these folders. In all "
            "other folders a guest sees a change after at most a second, and new content when it next "
            "opens the file"
        ),
    ] = ()
    locks: Annotated[
        LockPolicy,
        documented(
            "where locks (flock(2), fcntl(2)) of programs in guests hold. cluster: on all hosts, as far as "
            "the file system itself has such locks; a process on the node with the user's rights, "
            "vhpc-locks, takes each lock on the node's file. guest: within one guest only. refuse: "
            "nowhere, programs get ENOLCK"
        ),
    ] = "cluster"
    locks_guest: Annotated[
        tuple[str, ...],
        documented(
            "folders with `locks` = guest, whatever `locks` says. It applies to all shares at or below these "
            "folders; of several listed folders the innermost counts"
        ),
    ] = ()
    locks_refuse: Annotated[
        tuple[str, ...], documented("folders with `locks` = refuse, in the same way as `locks_guest`")
    ] = ()
    threads: Annotated[
        int,
        documented(
            "threads of each virtiofsd that handle requests at the same time; 0: one request after the "
            "other, with the shortest time for each. More help where the file system behind it is slow",
            ge=0,
            le=64,
        ),
    ] = 0

    def __post_init__(self) -> None:
        """ValueError, which names the key, when values do not fit together."""
        if unfit := [path for path in self.cache_always if path not in self.read_only]:
            raise ValueError(
                f"cache_always has {unfit[0]}, which is not in read_only: "
                "guests would not see what others write"
            )
        if unfit := [path for path in self.snapshots if path not in self.read_only]:
            raise ValueError(f"snapshots has {unfit[0]}, which is not in read_only")
        for path in self.cache_always:
            if self._is_uncached(PurePosixPath(path)):
                raise ValueError(f"{path} is in cache_always, and in or below a folder of cache_never")
        guest, refuse = (set(map(PurePosixPath, paths)) for paths in (self.locks_guest, self.locks_refuse))
        if both := sorted(guest & refuse):
            raise ValueError(f"{both[0]} is in locks_guest and in locks_refuse")

    def cache_of(self, path: str) -> CachePolicy:
        """Which --cache a share of this path gets."""
        if path in self.cache_always:
            return "always"
        return "never" if self._is_uncached(PurePosixPath(path)) else "auto"

    def locks_of(self, path: str) -> LockPolicy:
        """Where locks in a share of this path hold."""
        for folder in (PurePosixPath(path), *PurePosixPath(path).parents):
            if folder in map(PurePosixPath, self.locks_guest):
                return "guest"
            if folder in map(PurePosixPath, self.locks_refuse):
                return "refuse"
        return self.locks

    def _is_uncached(self, path: PurePosixPath) -> bool:
        return any(path.is_relative_to(folder) for folder in self.cache_never)
