# SPDX-License-Identifier: Apache-2.0
"""The agent's virtio-serial port: guarded by the permissions of a socket, unlike vsock."""

from __future__ import annotations

from dataclasses import dataclass

from vhpc_slurm.domain.spec import DomainSpec

PORT_NAME = "org.vhpc.agent.0"


@dataclass(frozen=True)
class ChannelContext:
    """Values of the channel template."""

    socket: str
    port_name: str


def context(spec: DomainSpec) -> ChannelContext:
    """The port by which the agent finds us."""
    return ChannelContext(spec.agent_socket, PORT_NAME)
