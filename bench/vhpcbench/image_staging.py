# SPDX-License-Identifier: Apache-2.0
"""Runs on the node as `python -c`: stages an image into an empty store, prints seconds as JSON."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from vhpc_slurm.catalog import FolderCatalog, blobs
from vhpc_slurm.config import load
from vhpc_slurm.model import ImageRef
from vhpc_slurm.node.store import images
from vhpc_slurm.node.store.layout import Layout


def main() -> None:
    """argv[1]: the catalogue, whose image is named bench."""
    catalog, config = Path(sys.argv[1]), load()
    image = FolderCatalog(catalog).resolve(ImageRef.parse("bench"))
    paths = [str(FolderCatalog(catalog).blob_path(blob)) for blob in blobs(image.manifest)]
    with tempfile.TemporaryDirectory(dir=Path(config.images.store).parent) as folder:
        subprocess.run(["cat", *paths], check=True, stdout=subprocess.DEVNULL)  # all in the page cache
        began = time.monotonic()
        subprocess.run(["sha256sum", *paths], check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["cp", *paths, folder], check=True)
        subprocess.run(["sync", "-f", folder], check=True)
        tools = time.monotonic() - began
        for path in Path(folder).iterdir():
            path.unlink()
        changed = msgspec.structs.replace(config.images, catalog=str(catalog), store=f"{folder}/store")
        layout = Layout(msgspec.structs.replace(config, images=changed))
        began = time.monotonic()
        for _ in images.stage(layout, image):
            pass
        stage = time.monotonic() - began
    print(json.dumps({"tools": tools, "stage": stage}))


main()
