# SPDX-License-Identifier: Apache-2.0
"""Command line of vmimages/build: builds an image from a recipe and publishes it in a catalogue."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from vhpc_slurm.architecture import AARCH64, ARCHITECTURES, KERNEL_TYPE
from vmimages import foreign, labels
from vmimages import recipe as recipes
from vmimages.errors import BuildError
from vmimages.host import BuildStep, say
from vmimages.initrd import initrd, program, version
from vmimages.mirrors import ENVIRONMENT, choose
from vmimages.recipe import Recipe
from vmimages.rootfs import Base, base
from vmimages.store import Blob, Published, publish

SCHEMA = 1
BUILDER = "vmimages"
KERNEL_TYPES = {"vmlinux": KERNEL_TYPE + "elf", "bzImage": KERNEL_TYPE + "bzimage"}
"""By kernel.format, on x86_64."""
INITRD_TYPE = "application/vnd.vhpc.initrd.cpio"
ROOT_TYPES = {"erofs": "application/vnd.vhpc.root.erofs"}
EPILOG = """\
Needs mmdebstrap, erofs-utils, cryptsetup-bin and zstd.  Root builds in place, an ordinary
user in a user namespace (package uidmap, and a range in /etc/subuid).
For another architecture than this host's it needs arch-test, qemu-user-static,
and vhpc-agent and vhpc-init from a cross build; it takes several times longer.
The same recipe, packages and programs give the same bytes; only the
manifest's "created" differs, unless SOURCE_DATE_EPOCH is set.

Environment:
  VHPC_MIRROR, VHPC_SECURITY_MIRROR   default of --mirror and --security-mirror
                                      (otherwise those of the recipe or of this
                                      host's APT configuration)
  VHPC_IMAGE_CACHE                    default of --cache
  SOURCE_DATE_EPOCH                   the manifest's "created", seconds since 1970
"""


@dataclass(frozen=True)
class Options:
    """The parsed command line."""

    recipe: Path
    output: Path
    arch: str
    agent: Path | None
    init: Path | None
    name: str | None
    tag: str | None
    own: bool
    cache: Path
    mirror: str | None
    security_mirror: str | None
    refresh: bool
    label: list[str]
    as_json: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Build one image; exit status 0, 1 if the build failed, 2 for a wrong command line."""
    signal.signal(signal.SIGTERM, _interrupt)
    options = _parse(argv)
    started = time.monotonic()
    try:
        result = _build(options)
    except BuildError as err:
        print(f"vmimages/build: {err}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("vmimages/build: interrupted, nothing published", file=sys.stderr)
        return 130
    result["seconds"] = round(time.monotonic() - started, 1)
    if options.as_json:
        print(json.dumps(result, indent=2))
    else:
        print(f"{result['image']} {result['digest']}")
    return 0


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _parse(argv: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        prog="vmimages/build",
        description="Build a guest image from a recipe and publish it in a catalogue.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("recipe", type=Path, help="recipe, such as vmimages/recipes/debian-minimal.toml")
    add(
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="catalogue to publish in; created if absent",
    )
    add("--arch", default="", help="x86_64 or aarch64 (default: the recipe's, else this host's)")
    add("--agent", type=Path, metavar="PATH", help="static vhpc-agent (default: as built or installed)")
    add("--init", type=Path, metavar="PATH", help="static vhpc-init (default: as built or installed)")
    add("--name", help="name to publish under (default: the recipe's)")
    add("--tag", help="tag to publish under (default: the recipe's)")
    add("--own", action="store_true", help="the catalogue is the user's own: print own/NAME")
    add(
        "--cache",
        type=Path,
        metavar="DIR",
        default=_default_cache(),
        help="cache of finished bases (default: %(default)s)",
    )
    add(
        "--mirror",
        default=os.environ.get(ENVIRONMENT[0]),
        metavar="URL",
        help="Debian mirror, instead of the recipe's or this host's",
    )
    add(
        "--security-mirror",
        default=os.environ.get(ENVIRONMENT[1]),
        metavar="URL",
        help="mirror of Debian's security updates, likewise",
    )
    add("--refresh", action="store_true", help="ignore the cache and install current packages")
    add(
        "--label",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a label of the image; again for more",
    )
    add("--json", action="store_true", dest="as_json", help="print the result as JSON")
    return Options(**vars(parser.parse_args(argv)))


def _default_cache() -> Path:
    if named := os.environ.get("VHPC_IMAGE_CACHE"):
        return Path(named)
    if os.geteuid() == 0:
        return Path("/var/cache/vhpc/images")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vhpc/images"


def _build(options: Options) -> dict[str, Any]:
    recipe = _recipe(options)
    given = labels.parse(options.label)
    foreign.need_emulation(recipe.architecture)
    init = program("vhpc-init", options.init, recipe.architecture)
    agent = program("vhpc-agent", options.agent, recipe.architecture)
    agent_version = version(agent)
    made = base(recipe, options.cache.absolute(), refresh=options.refresh)
    if made.cached:
        say(f"root and kernel {made.kernel_release} are in the cache")
    with BuildStep(f"publishing in {options.output}"):
        blobs = {
            "kernel": Blob(kernel_type(recipe), made.kernel),
            "initrd": Blob(INITRD_TYPE, initrd(made, init, agent, recipe.root.source_date_epoch)),
            "root": Blob(ROOT_TYPES[recipe.root.format], made.root),
        }
        manifest = _manifest(recipe, made, agent_version, given)
        published = publish(options.output, recipe.image.name, recipe.image.tag, manifest, blobs)
    result = _result(recipe, made, published, blobs)
    if options.own:
        result["image"] = f"own/{result['image']}"
    return result


def _recipe(options: Options) -> Recipe:
    if options.arch and options.arch not in ARCHITECTURES:
        raise BuildError(
            f"--arch={options.arch} is not an architecture of guests",
            f"allowed: {', '.join(ARCHITECTURES)}",
            next((f"use {one.name}" for one in ARCHITECTURES.values() if one.debian == options.arch), ""),
        )
    recipe = recipes.load(options.recipe, options.arch)
    image, debian = recipe.image, recipe.debian
    if options.name is not None:
        if not recipes.NAME.fullmatch(options.name):
            raise BuildError(
                f"--name={options.name} is not a valid name",
                "allowed: lower case letters, digits, '.', '_' and '-'",
            )
        image = replace(image, name=options.name)
    if options.tag is not None:
        if not recipes.TAG.fullmatch(options.tag):
            raise BuildError(
                f"--tag={options.tag} is not a valid tag", "allowed: letters, digits, '.', '_' and '-'"
            )
        image = replace(image, tag=options.tag)
    mirrors = choose(
        debian.suite,
        options.mirror or debian.mirror,
        options.security_mirror or debian.security_mirror,
    )
    debian = replace(debian, mirror=mirrors.archive, security_mirror=mirrors.security)
    return replace(recipe, image=image, debian=debian)


def kernel_type(recipe: Recipe) -> str:
    """The media type of the kernel that the builder makes."""
    return KERNEL_TYPE + "image" if recipe.architecture is AARCH64 else KERNEL_TYPES[recipe.kernel.format]


def _manifest(recipe: Recipe, made: Base, agent_version: str, given: dict[str, str]) -> dict[str, Any]:
    """The manifest without its blobs; docs/image-format.md explains the keys; all must be there.

    ``given`` are labels of the command line.
    """
    image = recipe.image
    now = int(os.environ.get("SOURCE_DATE_EPOCH") or time.time())
    own = {
        "vhpc/kernel-release": made.kernel_release,
        "vhpc/recipe": image.name,
        "vhpc/suite": recipe.debian.suite,
    }
    return {
        "schema": SCHEMA,
        "agent_version": agent_version,
        "arch": image.arch,
        "cmdline": " ".join(recipe.kernel.cmdline.split()),
        "description": image.description,
        "drivers": {name: made.driver_versions.get(name, "") for name in image.drivers},
        "firmware": image.firmware,
        "init": image.init,
        "labels": labels.joined(given, own),
        "min_cpus": image.min_cpus,
        "min_memory_mib": image.min_memory_mib,
        "process": {"arguments": [], "entrypoint": [], "environment": {}, "user": "", "working_dir": ""},
        "provenance": {
            "builder": BUILDER,
            "created": datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "parent": "",
            "source": f"recipe {image.name}, Debian {recipe.debian.suite}",
            "source_digest": f"sha256:{recipe.base_key()}",
        },
        "verity": made.verity,
    }


def _result(recipe: Recipe, made: Base, published: Published, blobs: dict[str, Blob]) -> dict[str, Any]:
    sizes = {field: blob.size() for field, blob in blobs.items()}
    return {
        "image": f"{recipe.image.name}:{recipe.image.tag}",
        "digest": published.digest,
        "changed": published.changed,
        "base_cached": made.cached,
        "kernel_release": made.kernel_release,
        "bytes": sizes,
        "packages": str(made.packages),
    }
