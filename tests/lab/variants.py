# SPDX-License-Identifier: Apache-2.0
"""Variants of a published image: manifests of their own, written on the controller by the format's words."""

from __future__ import annotations

from cluster import IMAGE

PRELUDE = """
import hashlib, json, os, pathlib

top = pathlib.Path("/shared/vhpc/catalog")

def load(name):
    digest = (top / "names" / name / "latest").read_text().strip().removeprefix("sha256:")
    return json.loads((top / "manifests/sha256" / (digest + ".json")).read_bytes())

def publish(name, manifest):
    raw = json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    digest = hashlib.sha256(raw).hexdigest()
    (top / "manifests/sha256" / (digest + ".json")).write_bytes(raw)
    (top / "names" / name).mkdir(exist_ok=True)
    (top / "names" / name / "latest").write_text("sha256:" + digest + "\\n")
    return digest

"""
"""Source of ``load`` and ``publish``, before the lines of a test."""

OWN = "/scratch/alice/images"
# Alice's copy of the site's image: only names and manifests are readable for others.
MINE = f"""
set -eu
umask 022
mkdir -p {OWN}/names/mine {OWN}/manifests/sha256 {OWN}/blobs/sha256
cd /shared/vhpc/catalog
digest=$(sed s/sha256:// names/{IMAGE}/latest)
cp names/{IMAGE}/latest {OWN}/names/mine/latest
cp manifests/sha256/$digest.json {OWN}/manifests/sha256/
for blob in $(python3 -c 'import json, sys
m = json.load(open(sys.argv[1]))
print(*[m[p]["sha256"] for p in ("kernel", "initrd", "root")])' manifests/sha256/$digest.json); do
    cp blobs/sha256/$blob {OWN}/blobs/sha256/
done
chmod -R go-rwx {OWN}/blobs
"""
