"""What each virtual function of a job is to be: from the lease's network identity and the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vhpc_slurm.errors import NodeError, UserError
from vhpc_slurm.fabric import keys
from vhpc_slurm.hardware import PciFunction, address_key
from vhpc_slurm.model import HostInventory, Lease, NetworkIdentity, NodePlan
from vhpc_slurm.node.preflight import VF
from vhpc_slurm.node.vf import Identity, mac_of

INFINIBAND = (0x0207, 0x0C06)


def of_plan(lease: Lease, plan: NodePlan, host: HostInventory) -> dict[str, Identity]:
    """The identity of each virtual function of a plan, by address.

    A guest's InfiniBand functions count rail by rail: with one rail all of
    them, with several those of each physical function by themselves.

    Raises:
        UserError: more functions than a guest has ports in the job's partition, or there is no partition.
        NodeError: a function is neither of InfiniBand nor of Ethernet.
    """
    functions = {function.address: function for function in host.pci}
    nodes = [part.node for part in lease.allocation.nodes]
    found: dict[str, Identity] = {}
    for guest in plan.guests:
        own = [functions[device.address] for device in guest.devices if device.role == VF]
        ib = sorted(
            (function for function in own if function.class_code >> 8 in INFINIBAND),
            key=lambda function: (address_key(function.physfn), address_key(function.address)),
        )
        rank = lease.network.first_rank + nodes.index(plan.node) * len(plan.guests) + guest.index
        found |= _infiniband(ib, lease.network, rank, plan.node)
        for function in own:
            if function in ib:
                continue
            if function.class_code >> 8 != 0x0200:
                raise NodeError(
                    f"virtual function {function.address} has class {function.class_code:06x}",
                    "only functions of InfiniBand and Ethernet adapters have an identity",
                )
            mac = mac_of(plan.node, function.address)
            found[function.address] = Identity(mac=mac, vlan=lease.network.vlan or 0)
    return found


def _infiniband(
    functions: Sequence[PciFunction], network: NetworkIdentity, rank: int, node: str
) -> Mapping[str, Identity]:
    if not functions:
        return {}
    if network.kind != "ib" or network.pkey is None:
        raise UserError(
            f"the job asks for {len(functions)} InfiniBand functions on {node}",
            "this site gives jobs no partition of the fabric, and without one a guest could talk to all",
            "ask for none, or the operators for fabric.backend",
        )
    ports = list(dict.fromkeys(function.physfn for function in functions))
    found, taken = {}, dict[int, int]()
    for function in functions:
        rail = ports.index(function.physfn) if network.rails > 1 else 0
        number = taken.get(rail, 0)
        taken[rail] = number + 1
        if rail >= network.rails or number >= network.vfs:
            raise UserError(
                f"the job asks for {len(functions)} InfiniBand functions on {node}",
                f"its guests have {network.vfs} on each of {network.rails} rails in the fabric",
                "ask for fewer",
            )
        place = (network.pkey, rail, rank, number)
        found[function.address] = Identity(keys.node_guid(*place), keys.port_guid(*place), network.pkey)
    return found
