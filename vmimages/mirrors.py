# SPDX-License-Identifier: Apache-2.0
"""Debian mirrors, by default those of this host's APT configuration.

No mirror is built in.  APT itself reads its configuration (sources.list,
sources.list.d/\\*.list and \\*.sources), so every format, option and
``Enabled: no`` works as in ``apt-get``.  The image builder and the lab use this
module.

Source: sources.list(5); apt-get(8), ``indextargets``; apt-transport-mirror(1).
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vmimages.errors import BuildError

ETC = Path("/etc/apt")
# Variables that name a mirror instead of APT's configuration, for vmimages/build, vlab and hwlab.
ENVIRONMENT = ("VHPC_MIRROR", "VHPC_SECURITY_MIRROR")
# Names of Debian's releases.  Sources of other distributions have other names.
_RELEASES = {"oldoldstable", "oldstable", "stable", "testing", "unstable", "sid"} | {
    "bullseye",
    "bookworm",
    "trixie",
    "forky",
    "duke",
}
# Suites without updates and security updates.
_ROLLING = {"sid", "unstable"}
_SECURITY = re.compile(r"(.+)(?:-security|/updates)")
# Mirrors use this path for the archive (https://www.debian.org/mirror/ftpmirror); repositories of
# third parties may also use the names of Debian's releases.
_ARCHIVE = re.compile(r"/debian(?:/[0-9]{8}T[0-9]{6}Z)?/*$")


@dataclass(frozen=True)
class Mirrors:
    """Base URLs without a final slash.

    ``archive`` has releases and their updates.  ``security`` has security updates; it is empty for
    unstable, which has no security updates.
    """

    archive: str
    security: str = ""


@dataclass(frozen=True)
class Source:
    """One release of one repository in APT's configuration."""

    url: str
    release: str
    component: str


def choose(suite: str, archive: str = "", security: str = "", etc: Path = ETC) -> Mirrors:
    """The mirrors of a suite: the given ones, the others from APT's configuration.

    Args:
        suite: Debian release, such as ``trixie``.
        archive: given mirror of the archive, may be empty.
        security: given mirror of security updates, may be empty.
        etc: APT's configuration folder.

    Raises:
        BuildError: no mirror is given or configured, or APT cannot read its configuration.
    """
    rolling = suite in _ROLLING
    if archive and (security or rolling):
        return Mirrors(archive.rstrip("/"), "" if rolling else security.rstrip("/"))
    known = configured(etc)
    return Mirrors(
        archive=(archive or _archive(known, suite)).rstrip("/"),
        security="" if rolling else (security or _security(known, suite)).rstrip("/"),
    )


def sources(suite: str, mirrors: Mirrors, components: Sequence[str] = ("main",)) -> list[str]:
    """Lines of sources.list(5) for a suite with its updates and security updates."""
    parts = " ".join(components)
    lines = [f"deb {mirrors.archive} {suite} {parts}"]
    if suite not in _ROLLING:
        lines += [
            f"deb {mirrors.archive} {suite}-updates {parts}",
            f"deb {mirrors.security} {suite}-security {parts}",
        ]
    return lines


def configured(etc: Path = ETC) -> list[Source]:
    """All package sources in APT's configuration, in APT's own order.

    Raises:
        BuildError: APT is not installed or cannot read its configuration.
    """
    # REPO_URI is last because the URI of a CD has spaces.  With --no-release-info APT also lists
    # sources whose indexes were never downloaded.
    argv = ["apt-get", "indextargets", "--no-release-info", "-o", f"Dir::Etc={etc}"]
    argv += ["--format", "$(COMPONENT) $(RELEASE) $(REPO_URI)", "Created-By: Packages"]
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, check=True, timeout=60, env=environment, cwd="/"
        )
    except FileNotFoundError as err:
        raise BuildError("no Debian mirror is known", "this host has no APT", _name_one(0)) from err
    except (OSError, subprocess.TimeoutExpired) as err:
        raise BuildError("cannot run apt-get", str(err), _name_one(0)) from err
    except subprocess.CalledProcessError as err:
        said = " ".join(err.stderr.split())
        raise BuildError(
            f"APT cannot read its configuration in {etc}", said, "correct it, or " + _name_one(0)
        ) from err
    found = []
    for line in dict.fromkeys(done.stdout.splitlines()):
        component, release, url = line.split(" ", 2)
        found.append(Source(_first_of_list(url.rstrip("/")), release, component))
    return found


def _first_of_list(url: str) -> str:
    """The first mirror of a mirror list in a local file; any other URL unchanged."""
    method, _, path = url.partition(":")
    if method != "mirror+file":
        return url
    try:
        lines = Path("/" + path.lstrip("/")).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return url
    urls = (line.split("\t")[0].strip() for line in lines)
    return next((one.rstrip("/") for one in urls if _usable(one)), url)


def _usable(url: str) -> bool:
    return url.startswith(("http://", "https://"))


def _archive(known: Sequence[Source], suite: str) -> str:
    """Debian's archive: prefers the usual path, then a source of this suite."""
    found = [
        one for one in known if one.component == "main" and one.release in _RELEASES and _usable(one.url)
    ]
    if not found:
        raise BuildError("no Debian mirror is known", _without(known, "a release of Debian"), _name_one(0))
    return min(found, key=lambda one: (not _ARCHIVE.search(one.url), one.release != suite)).url


def _security(known: Sequence[Source], suite: str) -> str:
    found = []
    for one in known:
        match = _SECURITY.fullmatch(one.release)
        if match and match[1] in _RELEASES and one.component == "main" and _usable(one.url):
            found.append((match[1] != suite, one.url))
    if not found:
        raise BuildError(
            "no mirror of Debian's security updates is known",
            _without(known, "security updates of Debian"),
            _name_one(1),
        )
    return min(found, key=lambda one: one[0])[1]


def _without(known: Sequence[Source], what: str) -> str:
    text = f"APT of this host has no http or https source with the component main of {what}"
    names = dict.fromkeys(f"{one.url} {one.release}" for one in known)
    return f"{text}, it has: {', '.join(names)}" if names else f"{text}, it has no sources"


def _name_one(which: int) -> str:
    option, key = (("--mirror", "debian.mirror"), ("--security-mirror", "debian.security_mirror"))[which]
    return f"set {ENVIRONMENT[which]}=URL, or for an image use {option} URL or set {key} in the recipe"
