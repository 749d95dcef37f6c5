# SPDX-License-Identifier: Apache-2.0
"""Programs of attackers and listeners on networks of jobs: run by python3 in guests and on hosts."""

# Runs as root of a guest until a file appears; prints each source address, and each marked word, once.
SNIFF = """
import os, re, socket, sys
# without a protocol it hears nothing until it is bound: with one it would hear lo
sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
sock.bind(("vhpc0", 3))
sock.settimeout(0.3)
seen = set()
print("ready", flush=True)
while not os.path.exists(sys.argv[1]):
    try:
        frame, where = sock.recvfrom(65536)
    except TimeoutError:
        continue
    if where[2] == socket.PACKET_OUTGOING:
        continue
    found = re.search(rb"marked-[a-z0-9-]+", frame)
    for line in ("from " + frame[6:12].hex(":"), "heard " + found[0].decode() if found else ""):
        if line and line not in seen:
            seen.add(line)
            print(line, flush=True)
"""

# Sends what VXLAN looks like from an ordinary socket: to ADDRESS PORT, bytes in hexadecimal.
SEND = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    try:
        sock.sendto(bytes.fromhex(sys.argv[3]), (sys.argv[1], int(sys.argv[2])))
        print("sent")
    except PermissionError:
        print("refused")
"""

# Runs as root of another job's guest: raw frames of every kind to the victim's addresses.
SPOOF = """
import socket, struct, sys
mine, words = sys.argv[1], sys.argv[2:]
victims = [bytes.fromhex(word) for word in words]
raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
raw.bind(("vhpc0", 0))
own = raw.getsockname()[4]
kind = (0x88B5).to_bytes(2, "big")
here, everybody = (socket.inet_pton(socket.AF_INET6, name) for name in ("fd76:6870:6300::1", "ff02::1"))
def advertisement(claimed):
    # of the address of the first guest at another MAC; with an option of no kind that carries the mark
    body = struct.pack("!BBHI", 136, 0, 0, 0x20000000) + here + bytes([2, 1]) + claimed
    body += bytes([253, 3]) + b"marked-nd".ljust(22, b".")
    total = sum(struct.unpack("!48H", here + everybody + struct.pack("!II", len(body), 58) + body))
    check = 0xFFFF - (total % 0xFFFF)
    body = body[:2] + check.to_bytes(2, "big") + body[4:]
    return struct.pack("!IHBB", 6 << 28, len(body), 58, 255) + here + everybody + body
for to in (*victims, b"\\xff" * 6, b"\\x33\\x33\\0\\0\\0\\x01"):
    for source in (own, *victims):
        raw.send(to + source + kind + b"marked-raw-" + b"." * 40)
        arp = struct.pack("!HHBBH", 1, 0x0800, 6, 4, 2) + source + bytes([10, 200, 0, 1])
        raw.send(to + source + b"\\x86\\xdd" + advertisement(source))
        raw.send(to + source + b"\\x08\\x06" + arp + victims[0] + bytes([10, 200, 0, 2]) + b"marked-arp")
print("spoofed as", own.hex(":"))
"""

# Runs as an ordinary user of a guest: tells its peer the words MARK-bcast, -mc4, -mc6 by broadcast and by the
# groups of mDNS, and MARK-uni directly; prints what it hears, SECONDS after it has heard all of EXPECTED.
TALK = """
import select, socket, struct, sys, time
mark, peer, seconds, expected = sys.argv[1], sys.argv[2], float(sys.argv[3]), set(sys.argv[4:])
port, index = 5399, socket.if_nametoindex("vhpc0")
four = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
six = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
six.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
four.bind(("", port)), six.bind(("", port))
four.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
group = struct.pack("4s4si", socket.inet_aton("224.0.0.251"), bytes(4), index)
four.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
four.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, group)
four.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 0)
wanted = struct.pack("16si", socket.inet_pton(socket.AF_INET6, "ff02::fb"), index)
six.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, wanted)
six.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, index)
six.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_LOOP, 0)
heard, began, last, since = set(), time.monotonic(), 0.0, None
while time.monotonic() < began + 200 and (since is None or time.monotonic() < since + seconds):
    if time.monotonic() > last + 0.3:
        last = time.monotonic()
        four.sendto((mark + "-bcast").encode(), ("10.200.255.255", port))
        four.sendto((mark + "-mc4").encode(), ("224.0.0.251", port))
        six.sendto((mark + "-mc6").encode(), ("ff02::fb", port))
        four.sendto((mark + "-uni").encode(), (peer, port))
    for sock in select.select([four, six], [], [], 0.1)[0]:
        heard.add(sock.recv(1000).decode())
    if since is None and expected <= heard:
        since = time.monotonic()
print(mark, "heard", *sorted(word for word in heard if not word.startswith(mark)))
"""

# Runs as root of a guest: broadcast datagrams whose frames have another source address.
MASQUERADE = """
import socket
with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as raw:
    raw.bind(("vhpc0", 0))
    own = raw.getsockname()[4]
    data = b"spoofed"
    ip = bytes([0x45, 0, 0, 28 + len(data), 0, 1, 0, 0, 64, 17, 0, 0, 10, 200, 0, 9]) + b"\\xff" * 4
    total = sum(int.from_bytes(ip[at:at + 2], "big") for at in range(0, 20, 2))
    total = (total & 0xFFFF) + (total >> 16)
    ip = ip[:10] + (total ^ 0xFFFF).to_bytes(2, "big") + ip[12:]
    udp = (5399).to_bytes(2, "big") * 2 + (8 + len(data)).to_bytes(2, "big") + bytes(2) + data
    for source in (own[:5] + bytes([own[5] ^ 0x40]), bytes.fromhex("020000000001")):
        raw.send(b"\\xff" * 6 + source + b"\\x08\\0" + ip + udp)
    own_words = udp[:8] + b"genuine"
    raw.send(b"\\xff" * 6 + own + b"\\x08\\0" + ip + own_words)
"""

# Runs as root of a guest: raw frames with a mark to a MAC address, from its own address and from OTHERS.
RAW = """
import socket, sys
mark, to, *others = sys.argv[1:]
with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as raw:
    raw.bind(("vhpc0", 0))
    for source in (raw.getsockname()[4], *map(bytes.fromhex, others)):
        raw.send(bytes.fromhex(to) + source + b"\\x88\\xb5" + mark.encode() + b"." * 40)
"""


def mac(vni: int, rank: int) -> bytes:
    """The address that docs/network.md defines."""
    return bytes([6, *vni.to_bytes(3, "big"), *rank.to_bytes(2, "big")])


def vxlan(vni: int, frame: bytes) -> str:
    """A frame with the header of VXLAN, in hexadecimal."""
    return (b"\x08\0\0\0" + vni.to_bytes(3, "big") + b"\0" + frame).hex()
