# SPDX-License-Identifier: Apache-2.0
"""GPU nodes as public reports describe them, as trees: which switch ports are above which device.

A line: NUMA cell, buses of the upstream ports of switches above the device from the outermost on, bus, class
and ids of the device.  Downstream ports, root ports and memory are not in the reports; here the downstream
ports of a switch are on the bus after its upstream port.

Sources: MI300X, MI250X: github.com/ROCm/rccl (tools/topo_expl/models/topo_8p_940.xml, topo_16p1h.xml,
commit 0cbce2a7), what RCCL read on such nodes; MI100: lspci of an issue of the same repository (from "ACS is
enabled for some of PCI bridges", 2022-06-28); A100 (PCI Express cards): lspci of github.com/NVIDIA/nccl,
issue 1405; H100 (one of eight of an HGX): github.com/aliyun/SimAI, issue 128.
"""

from __future__ import annotations

from pathlib import Path

from machine_tree import BRIDGE, Function, MachineTree

MI300X = """
0 05>08>0a 0c 120000 1002:74a1
0 05 07 020700 15b3:1021
0 0e>11>13 15 120000 1002:74a1
0 0e 10 020700 15b3:1021
0 17>1a>1c 1e 120000 1002:74a1
0 17 19 020700 15b3:1021
0 62>65>67 69 120000 1002:74a1
0 62 64 020700 15b3:1021
1 98>9b>9d 9f 120000 1002:74a1
1 98 9a 020700 15b3:1021
1 a8>ab>ad af 120000 1002:74a1
1 a8 aa 020700 15b3:1021
1 b8>bb>bd bf 120000 1002:74a1
1 b8 ba 020700 15b3:1021
1 d8>db>dd df 120000 1002:74a1
1 d8 da 020700 15b3:1021
"""
MI250X = """
0 41>49>4c 4e 038000 1002:740c
0 41>49>4f 51 038000 1002:740c
0 41>49 4b 020700 15b3:101b
0 41>52>54 56 038000 1002:740c
0 41>52>57 59 038000 1002:740c
0 41>52 5a 020700 15b3:101b
1 01>09>0c 0e 038000 1002:740c
1 01>09>0f 11 038000 1002:740c
1 01>09 0b 020700 15b3:101b
1 01>12>14 16 038000 1002:740c
1 01>12>17 19 038000 1002:740c
1 01>12 1a 020700 15b3:101b
2 c2>ca>cd cf 038000 1002:740c
2 c2>ca>d0 d2 038000 1002:740c
2 c2>ca cc 020700 15b3:101b
2 c2>d3>d5 d7 038000 1002:740c
2 c2>d3>d8 da 038000 1002:740c
2 c2>d3 db 020700 15b3:101b
3 82>8a>8d 8f 038000 1002:740c
3 82>8a>90 92 038000 1002:740c
3 82>8a 8c 020700 15b3:101b
3 82>93>95 97 038000 1002:740c
3 82>93>98 9a 038000 1002:740c
3 82>93 9b 020700 15b3:101b
"""
MI100 = """
1 43 45 020700 15b3:101b
1 43>46>48 4a 038000 1002:738c
1 43>4c>4e 50 038000 1002:738c
"""
A100 = """
1 98 9a 020000 15b3:101d
1 98 9b 030200 10de:20b5
1 98 9c 030200 10de:20b5
1 98 9d 030200 10de:20b5
1 98 9e 030200 10de:20b5
"""
H100 = """
1 d7 da 020700 15b3:1021
1 d7 d9 030200 10de:2330
"""
PORT_CAN = "SrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans+"
PORT_HAS = "SrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-"
"""ACSCap and ACSCtl of the bridge in that issue, as lspci prints them; the kernel sets such with an IOMMU."""
PORT_WANTED = PORT_HAS.replace("DirectTrans-", "DirectTrans+")
"""What NVIDIA's appendix on ATS and ACS asks for."""
PORT_OPEN = PORT_HAS.replace("+", "-")
"""After setpci ECAP_ACS+6.w=0000, which guides for bare metal recommend."""
VF_OF = {0x101B: 0x101C, 0x101D: 0x101E, 0x1021: 0x101E}
ADAPTERS = 0x15B3
BAR = 64 << 30


def machine(root: Path, lines: str) -> MachineTree:
    """The tree of a machine; each adapter has one virtual function."""
    rows = [line.split() for line in lines.split("\n") if line]
    tree = MachineTree(root, sockets=max(int(row[0]) for row in rows) + 1, cores=4, threads=1, cell_mib=65536)
    ports: dict[str, list[str]] = {}
    groups = iter(range(1, 1 << 16))
    for cell, chain, bus, kind, ids in rows:
        buses = chain.split(">")
        home = f"pci0000:{int(buses[0], 16) - 1:02x}"
        bridges = [f"0000:{home[-2:]}:01.0"]
        _bridge(tree, home, int(cell), bridges, next(groups))
        for at, upstream in enumerate(buses):
            bridges.append(f"0000:{upstream}:00.0")
            _bridge(tree, home, int(cell), bridges, next(groups))
            below = (*buses[at + 1 :], bus)[0]
            slots = ports.setdefault(upstream, [])
            if below not in slots:
                slots.append(below)
            bridges.append(f"0000:{int(upstream, 16) + 1:02x}:{slots.index(below):02x}.0")
            _bridge(tree, home, int(cell), bridges, next(groups))
        vendor, device = (int(word, 16) for word in ids.split(":"))
        whose = (int(kind, 16), vendor, device)
        if vendor == ADAPTERS:
            pf = Function(f"0000:{bus}:00.0", *whose, "mlx5_core", (1 << 25,), next(groups), "flr bus")
            virtual = (int(kind, 16), vendor, VF_OF[device], "", (1 << 20,), next(groups), "flr")
            tree.vfs(home, int(cell), bridges, pf, [Function(f"0000:{bus}:00.1", *virtual)])
        else:
            gpu = Function(f"0000:{bus}:00.0", *whose, "", (BAR,), next(groups), "flr bus")
            tree.pci(home, int(cell), bridges, gpu)
    return tree


def _bridge(tree: MachineTree, home: str, cell: int, chain: list[str], group: int) -> None:
    if not (tree.sys / "bus/pci/devices" / chain[-1]).exists():
        tree.pci(home, cell, chain[:-1], Function(chain[-1], BRIDGE, driver="pcieport", group=group))


def bits(text: str) -> int:
    """lspci's words of ACSCap or ACSCtl as the register has them: the first word is bit 0."""
    return sum(word.endswith("+") << at for at, word in enumerate(text.split()))


def with_controls(config: bytes, *, acs: tuple[str, str] | None = None, ats: bool | None = None) -> bytes:
    """A configuration space with ACS and ATS: each capability is 32 bytes behind the one before."""
    space = bytearray(config[:0x100].ljust(0x1000, b"\0"))
    capabilities = [(0x0001, 0, 0)]  # AER, which all have
    if acs is not None:
        capabilities.append((0x000D, bits(acs[0]), bits(acs[1])))
    if ats is not None:
        capabilities.append((0x000F, 0, 0x8000 if ats else 0))
    for number, (kind, can, on) in enumerate(capabilities):
        at, after = 0x100 + 32 * number, 0x100 + 32 * (number + 1)
        last = number + 1 == len(capabilities)
        space[at : at + 4] = (kind | 1 << 16 | (0 if last else after) << 20).to_bytes(4, "little")
        space[at + 4 : at + 8] = can.to_bytes(2, "little") + on.to_bytes(2, "little")
    return bytes(space)


def give(
    tree: MachineTree, address: str, *, acs: tuple[str, str] | None = None, ats: bool | None = None
) -> None:
    """Give a function of a tree ACS or ATS."""
    path = tree.sys / "bus/pci/devices" / address / "config"
    path.write_bytes(with_controls(path.read_bytes(), acs=acs, ats=ats))
