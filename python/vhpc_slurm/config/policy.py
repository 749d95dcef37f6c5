# SPDX-License-Identifier: Apache-2.0
"""The tables [[policy]] of vhpc.toml: what jobs of a partition, an account, a QOS or a user may do."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from vhpc_slurm.config.setting import documented

ShareKind = Literal["home", "work_dir", "site"]
"""Keys of [shares] whose folders guests see."""


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The first rule whose conditions all hold for a job applies to it; later rules do not.

    Conditions are partitions, accounts, qos and users. A job for which no rule holds may do
    what the other tables permit. Texts are patterns of fnmatch(3): `*` stands for any text.
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
