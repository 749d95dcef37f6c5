# SPDX-License-Identifier: Apache-2.0
"""A fake of nvidia_gpu_tools.py, of NVIDIA's gpu-admin-tools.

Modelled on its source (commit 82422cc1): MIG mode is known only of GA100, others fail an assertion; a query
comes before a change, which the next reset applies.  Its lines go to standard error and begin with the time.
If it cannot clear a GPU's memory it prints an error, and ends with 0 all the same.
Files of a GPU: its mode, ``pending``, ``stuck`` (it keeps its mode), ``silent`` (its mode is not printed),
``unsupported`` (its memory cannot be cleared).
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from attribute_fs import fixed
from fake_pci_device import Device

from vhpc_slurm.node.devices import scrub

A100, V100 = 0x20B5, 0x1DB4
SCRIPT = """#!{python} -IS
import pathlib, sys
address = sys.argv[1].removeprefix("--gpu-bdf=")
state, asked = pathlib.Path({state!r}), sys.argv[2:]
with (state / "log").open("a") as log:
    log.write(f"{{address}} {{' '.join(asked)}}\\n")
mode = state / f"{{address}}.mode"
assert mode.exists() or asked == ["--reset-with-sbr", "--clear-memory"]
if "--clear-memory" in asked and (state / f"{{address}}.unsupported").exists():
    unsupported = f"ERROR    Clearing memory not supported on GPU {{address}} A40 0x2235 BAR0 0xa0000000"
    print(f"2026-11-29,00:00:00.000 {{unsupported}}", file=sys.stderr)
name = f"2026-11-29,00:00:00.000 INFO     GPU {{address}} A100-PCIE 0x20b5 BAR0 0xa0000000"
if "--query-mig-mode" in asked and not (state / f"{{address}}.silent").exists():
    print(f"{{name}} MIG mode is {{mode.read_text()}}", file=sys.stderr)
if "--force-mig-off-after-reset" in asked:
    (state / f"{{address}}.pending").touch()
    print(f"{{name}} set MIG to be disabled after next reset", file=sys.stderr)
"""


@dataclass
class GpuTools:
    state: Path

    def file(self, gpu: Device, name: str) -> Path:
        return self.state / f"{gpu.address}.{name}"

    def asked(self, gpu: Device) -> list[str]:
        """Options of all calls for a GPU."""
        calls = (line.partition(" ") for line in (self.state / "log").read_text().splitlines())
        return [options for address, _, options in calls if address == gpu.address]

    def model(self, gpu: Device, device: int) -> None:
        """Make a GPU one of this PCI device number."""
        gpu.folder.entries["device"] = fixed(f"0x{device:04x}\n")
        gpu.config[2:4] = device.to_bytes(2, "little")

    def mig(self, gpu: Device, *, on: bool) -> None:
        """Make a GPU an A100 in this mode."""
        self.model(gpu, A100)
        self.file(gpu, "mode").write_text("enabled" if on else "disabled")
        gpu.on_reset = self._reset

    def _reset(self, gpu: Device) -> None:
        if self.file(gpu, "pending").exists() and not self.file(gpu, "stuck").exists():
            self.file(gpu, "mode").write_text("disabled")
        self.file(gpu, "pending").unlink(missing_ok=True)


@pytest.fixture(name="tools")
def gpu_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GpuTools:
    """The tool is installed."""
    found, folder = GpuTools(tmp_path / "gpu-tools"), tmp_path / "gpu-admin-tools"
    found.state.mkdir()
    folder.mkdir()
    script = folder / scrub.TOOL
    script.write_text(SCRIPT.format(python=os.path.realpath(sys.executable), state=str(found.state)))
    script.chmod(0o755)
    monkeypatch.setattr(scrub, "WHERE", f"{folder}:/usr/bin:/bin")
    return found
