# SPDX-License-Identifier: Apache-2.0
"""Variants of a published image: manifests of their own, written on the controller by the format's words."""

from __future__ import annotations

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
