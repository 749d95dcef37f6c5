# SPDX-License-Identifier: Apache-2.0
"""The GPU map: whole GPUs, mdevs and vGPUs by Slurm's index."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from vhpc_slurm.device import mdev_key, mdev_parent
from vhpc_slurm.errors import NodeError
from vhpc_slurm.node.devices import gpumap

MAP = """\
# index address
0 0000:1b:00.0 3
1 0000:3b:00.0 mdev=nvidia-474
2 0000:3b:00.0 mdev=nvidia-478   # another type of the same GPU
3 10000:5e:02.7 mdev=i915-GVTg_V5_4
4 0000:5f:00.4 vgpu=H200X-1-18C
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gpu.map"


def test_each_mdev_of_a_gpu_has_a_key_of_its_own(path: Path) -> None:
    path.write_text(MAP)
    keys = gpumap.read_gpu_map(path)
    assert keys == (
        "0000:1b:00.0",
        "76687063-0000-8000-8000-000000003b00",
        "76687063-0000-8001-8000-000000003b00",
        "76687063-0000-8000-8000-000100005e17",
        "0000:5f:00.4",
    )
    assert gpumap.modules(path) == {"0000:1b:00.0": 3}
    assert gpumap.types(path, gpumap.MDEV) == {
        keys[1]: "nvidia-474",
        keys[2]: "nvidia-478",
        keys[3]: "i915-GVTg_V5_4",
    }
    assert gpumap.types(path, gpumap.VGPU) == {keys[4]: "H200X-1-18C"}


@pytest.mark.parametrize("parent", ["0000:3b:00.0", "10000:ff:1f.7", "0001:00:10.3"])
def test_the_key_of_an_mdev_names_its_parent(parent: str) -> None:
    key = mdev_key(parent, 4095)
    # RFC 9562, section 5.8: a UUID of version 8 has 122 bits of the application
    assert (uuid.UUID(key).version, uuid.UUID(key).variant, str(uuid.UUID(key))) == (8, uuid.RFC_4122, key)
    assert uuid.UUID(key).bytes[:4] == b"vhpc"
    assert mdev_parent(key) == parent


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0 0000:3b:00.0 mdev=\n", "line 1 of"),
        ("0 0000:3b:00.0 mdev=../../remove\n", "line 1 of"),
        ("0 0000:3b:00.0 mdev=a/b\n", "line 1 of"),
        ("0 0000:3b:00.0 gpu=x\n", "line 1 of"),
        ("0 0000:3b:00.0 3 mdev=x\n", "line 1 of"),
        ("0 76687063-0000-8000-8000-000000003b00\n", "line 1 of"),
        ("0 0000:3b:00.0 mdev=x\n1 0000:3b:00.0\n", "lists 0000:3b:00.0 with mdevs and, as index 1, without"),
        ("0 0000:3b:00.0 5\n1 0000:3b:00.0 mdev=x\n", "as index 0, without"),
        ("0 0000:3b:00.4 vgpu=x\n1 0000:3b:00.4 mdev=x\n", "as index 0, without"),
    ],
)
def test_an_invalid_map_is_refused(path: Path, text: str, says: str) -> None:
    path.write_text(text)
    with pytest.raises(NodeError, match=says):
        gpumap.read_gpu_map(path)
