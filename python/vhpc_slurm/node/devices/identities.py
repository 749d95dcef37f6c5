# SPDX-License-Identifier: Apache-2.0
"""Identities of a job's virtual functions, from the lease's network identity and the plan."""

from __future__ import annotations

from collections.abc import Iterator

from vhpc_slurm.device import VfIdentity
from vhpc_slurm.errors import NodeError, UserError
from vhpc_slurm.fabric import numbers
from vhpc_slurm.hardware import PciFunction, address_key
from vhpc_slurm.model import HostInventory, Lease, NetworkIdentity, NodePlan
from vhpc_slurm.record import Record

INFINIBAND = (0x0207, 0x0C06)
ETHERNET = (0x0200,)


def of_plan(lease: Lease, plan: NodePlan, host: HostInventory) -> dict[str, VfIdentity]:
    """The identity of each virtual function of a plan, by address.

    A guest's functions are numbered per rail.  With several rails, the node's
    adapters are the rails, in the order of their addresses.

    Raises:
        UserError: more functions than a guest has ports in the job's partition, or there is no partition.
        NodeError: a function is neither InfiniBand nor Ethernet.
    """
    functions = {function.address: function for function in host.pci}
    nodes = lease.allocation.node_names
    found: dict[str, VfIdentity] = {}
    for guest in plan.guests:
        own = [functions[device.key] for device in guest.devices if device.traits.networked]
        rank = lease.network.first_rank + nodes.index(plan.node) * len(plan.guests) + guest.index
        for kinds, identify in ((INFINIBAND, _infiniband), (ETHERNET, _ethernet)):
            some = [function for function in own if function.class_code >> 8 in kinds]
            adapters = {f.physfn for f in host.pci if f.physfn and f.class_code >> 8 in kinds}
            ordered = _Ordered(tuple(some), tuple(sorted(adapters, key=address_key)), plan.node)
            found |= identify(ordered, lease.network, rank)
        for function in own:
            if function.address not in found:
                raise NodeError(
                    f"virtual function {function.address} has class {function.class_code:06x}",
                    "only functions of InfiniBand and Ethernet adapters have an identity",
                )
    return found


class _Ordered(Record, frozen=True):
    """A guest's functions of one kind, and all adapters of the node with such functions."""

    functions: tuple[PciFunction, ...]
    adapters: tuple[str, ...]
    node: str

    def places(self, network: NetworkIdentity) -> Iterator[tuple[str, int, int]]:
        """(address, rail, number on that rail) of each function, by adapters and addresses."""
        taken: dict[int, int] = {}
        for function in sorted(self.functions, key=lambda f: (address_key(f.physfn), address_key(f.address))):
            rail = self.adapters.index(function.physfn) if network.rails > 1 else 0
            number = taken.get(rail, 0)
            taken[rail] = number + 1
            if rail >= network.rails or number >= network.vfs:
                raise UserError(
                    f"the job asks for {len(self.functions)} virtual functions on {self.node}",
                    f"its guests have {network.vfs} on each of {network.rails} rails in the fabric",
                    "request fewer",
                )
            yield function.address, rail, number

    def none(self, kind: str, why: str, option: str = "backend") -> dict[str, VfIdentity]:
        """No identities; an error if there are functions that need one."""
        if not self.functions:
            return {}
        raise UserError(
            f"the job asks for {len(self.functions)} {kind} functions on {self.node}",
            why,
            f"request none, or ask the operators to set fabric.{option}",
        )


def _infiniband(functions: _Ordered, network: NetworkIdentity, rank: int) -> dict[str, VfIdentity]:
    if network.kind == "ib" and network.port_guids:
        why = "this site's jobs have ports with fixed GUIDs, and a function would be in no partition"
        return functions.none("InfiniBand", why, "port_map")
    pkey = network.pkey if network.kind == "ib" else None
    if pkey is None:
        why = "this site gives jobs no partition of the fabric, and without one a guest could reach all ports"
        return functions.none("InfiniBand", why)
    return {
        address: VfIdentity(
            numbers.node_guid(pkey, rail, rank, number), numbers.port_guid(pkey, rail, rank, number), pkey
        )
        for address, rail, number in functions.places(network)
    }


def _ethernet(functions: _Ordered, network: NetworkIdentity, rank: int) -> dict[str, VfIdentity]:
    vlan = network.vlan if network.kind == "ethernet" else None
    if vlan is None:
        why = "this site gives jobs no VLAN, and without one a guest could reach all hosts"
        return functions.none("Ethernet", why)
    return {
        address: VfIdentity(
            mac=bytes.fromhex(numbers.mac(numbers.VLANS.base + vlan, rail, rank, number).replace(":", "")),
            vlan=vlan,
        )
        for address, rail, number in functions.places(network)
    }
