# SPDX-License-Identifier: Apache-2.0
"""Both ends of an X11 connection as Python programs: no X server and no library of X is needed.

They speak the connection setup of "X Window System Protocol", version 11, section 8, and read authority files
as libXau does (Xau(3)). After the setup the server repeats in upper case what it hears; a real one would not.
"""

from __future__ import annotations

COOKIE = bytes(range(0xA0, 0xB0))

# Arguments: address and port.  Prints a line when it listens, and one with the authorization of each client.
SERVER = """
import socket, struct, sys, threading

def take(link, count):
    data = b""
    while len(data) < count:
        data += link.recv(count - len(data)) or sys.exit("a client has left in its setup")
    return data

def serve(link):
    head = take(link, 12)
    order = "<" if head[0] == 0x6C else ">"
    lengths = struct.unpack(order + "6xHH2x", head)
    name, data = (take(link, count + -count % 4)[:count] for count in lengths)
    print(name.decode(), data.hex(), flush=True)
    link.sendall(struct.pack(order + "BxHHH", 1, 11, 0, 0))
    while heard := link.recv(65536):
        link.sendall(heard.upper())
    link.close()

with socket.create_server((sys.argv[1], int(sys.argv[2]))) as listener:
    print("listens", flush=True)
    while True:
        threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""

# The entries of an authority file: family, address, display, name and data of each.
ENTRIES = """
def entries(data):
    def take(count):
        nonlocal data
        taken, data = data[:count], data[count:]
        return taken
    number = lambda: int.from_bytes(take(2), "big")
    while data:
        yield number(), *(take(number()) for _ in range(4))
"""

# Prints the status of the setup and what comes back for each argument; with "-" it then waits for the end.
CLIENT = f"""{ENTRIES}
import os, socket, struct, sys

host, _, rest = os.environ["DISPLAY"].rpartition(":")
number = rest.partition(".")[0]
with open(os.environ.get("XAUTHORITY") or os.path.expanduser("~/.Xauthority"), "rb") as file:
    known = [
        (name, data)
        for family, address, display, name, data in entries(file.read())
        if display in (b"", number.encode())
        and (family == 65535 or (family == 256 and address == os.uname().nodename.encode()))
    ]
name, data = known[0] if known else (b"", b"")
padded = lambda text: text + bytes(-len(text) % 4)
link = socket.create_connection((host, 6000 + int(number)), 20)
link.sendall(struct.pack("<BxHHHHxx", 0x6C, 11, 0, len(name), len(data)) + padded(name) + padded(data))
print("setup", link.recv(8, socket.MSG_WAITALL)[:1], flush=True)
link.settimeout(None)
for word in sys.argv[1:]:
    if word == "-":
        print("end", link.recv(1), flush=True)
        break
    link.sendall(word.encode())
    print(link.recv(len(word), socket.MSG_WAITALL).decode(), flush=True)
"""


def authority(family: int, address: bytes, display: bytes, name: bytes, data: bytes) -> bytes:
    """One entry of an authority file."""
    fields = (address, display, name, data)
    return family.to_bytes(2, "big") + b"".join(len(text).to_bytes(2, "big") + text for text in fields)
