# SPDX-License-Identifier: Apache-2.0
"""Runs commands in the hardware lab's machine over a virtio-serial port; lab/hardware/agent serves it."""

from __future__ import annotations

import json
import socket
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlablib.report import LabError

# in addition to the command's limit, because an emulated machine starts and ends it slowly
_GRACE_S = 30


@dataclass(frozen=True)
class Done:
    """Result of a command in the machine."""

    code: int
    out: str
    err: str


def execute(port: Path, argv: list[str], user: str, stdin: str, timeout_s: float) -> Done:
    """Run a command in the machine.

    Raises:
        LabError: the machine does not run or did not answer in time.
    """
    name = uuid.uuid4().hex
    request = {"id": name, "argv": argv, "user": user, "stdin": stdin, "timeout_s": timeout_s}
    until = time.monotonic() + timeout_s + _GRACE_S
    try:
        with _connect(port, until) as link:
            link.sendall(json.dumps(request).encode() + b"\n")
            rest = b""
            while True:
                link.settimeout(max(0.1, until - time.monotonic()))
                data = link.recv(1 << 16)
                if not data:
                    raise LabError("the hardware lab's machine has ended; run: hwlab console")
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    reply = _reply(line)
                    # other data is the end of an answer for which an earlier caller did not wait
                    if reply.get("id") == name:
                        return Done(int(reply["code"]), str(reply["out"]), str(reply["err"]))
    except ConnectionError as err:
        raise LabError("the hardware lab's machine has ended; see: hwlab console") from err
    except TimeoutError as err:
        raise LabError(
            f"no answer to {argv[0]} within {timeout_s + _GRACE_S:g} s; see: hwlab console"
        ) from err


def _connect(port: Path, until: float) -> socket.socket:
    link = socket.socket(socket.AF_UNIX)
    try:
        link.settimeout(max(0.1, until - time.monotonic()))
        link.connect(str(port))
    except OSError as err:
        link.close()
        raise LabError(f"{port}: {err.strerror or err}; is the machine up? run: hwlab up") from err
    return link


def _reply(line: bytes) -> dict[str, Any]:
    try:
        reply = json.loads(line)
    except ValueError:
        return {}
    return reply if isinstance(reply, dict) else {}


def monitor(port: Path, command: str, arguments: dict[str, object], timeout_s: float = 30) -> Any:
    """Send QEMU a command (QMP) and return its answer.

    Raises:
        LabError: QEMU refused the command or did not answer.
    """
    until = time.monotonic() + timeout_s
    with _connect(port, until) as link, link.makefile("rwb") as stream:
        stream.readline()  # its greeting
        for name, values in (("qmp_capabilities", {}), (command, arguments)):
            stream.write(json.dumps({"execute": name, "arguments": values}).encode() + b"\n")
            stream.flush()
            while True:
                answer = json.loads(stream.readline() or b'{"error": "QEMU has ended"}')
                if "event" not in answer:
                    break
            if "error" in answer:
                raise LabError(f"QEMU refused {name}: {answer['error']}")
        return answer["return"]
