# SPDX-License-Identifier: Apache-2.0
"""Where Debian packages come from: the mirrors that this host's own APT is configured with.

No mirror is built in.  APT itself reads its configuration (sources.list,
sources.list.d/\\*.list and \\*.sources), so every format, option and
``Enabled: no`` means here what it means to ``apt-get``.  The image builder and
the lab both ask here.

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
# What names a mirror where APT's configuration does not, in vmimages/build, vlab and hwlab alike.
ENVIRONMENT = ("VHPC_MIRROR", "VHPC_SECURITY_MIRROR")
# Releases of Debian and its names for them.  Other distributions' sources have other names.
_RELEASES = {"oldoldstable", "oldstable", "stable", "testing", "unstable", "sid"} | {
    "bullseye",
    "bookworm",
    "trixie",
    "forky",
    "duke",
}
# These have no updates and no security updates of their own.
_ROLLING = {"sid", "unstable"}
_SECURITY = re.compile(r"(.+)(?:-security|/updates)")
# Mirrors call the archive so (https://www.debian.org/mirror/ftpmirror); a third party's repository
# may use Debian's names of releases too.
_ARCHIVE = re.compile(r"/debian(?:/[0-9]{8}T[0-9]{6}Z)?/*$")


@dataclass(frozen=True)
class Mirrors:
    """Base URLs without a slash at the end.

    ``archive`` has releases and their updates.  ``security`` has security updates; it is empty for
    unstable, which has none.
    """

    archive: str
    security: str = ""


@dataclass(frozen=True)
class Source:
    """One release of one repository that APT is configured with."""

    url: str
    release: str
    component: str


def choose(suite: str, archive: str = "", security: str = "", etc: Path = ETC) -> Mirrors:
    """The mirrors of a suite: those that are named, the others from APT's configuration.

    Args:
        suite: Debian release, such as ``trixie``.
        archive: mirror that was named; empty if none was.
        security: mirror of security updates that was named; empty if none was.
        etc: APT's configuration folder.

    Raises:
        BuildError: a mirror was neither named nor configured, or APT cannot read its configuration.
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
    """All package sources that APT is configured with, in APT's own order.

    Raises:
        BuildError: there is no APT, or it cannot read its configuration.
    """
    # REPO_URI is last: that of a CD has spaces.  Without release information APT also lists sources
    # whose indexes were never downloaded.
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
    """The first mirror of a list of mirrors in a local file; any other URL as it is."""
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
    """Debian's archive: its usual path before any other, a source of this very suite before others."""
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
    return f"{text}, it has: {', '.join(names)}" if names else f"{text}, it has no sources at all"


def _name_one(which: int) -> str:
    option, key = (("--mirror", "debian.mirror"), ("--security-mirror", "debian.security_mirror"))[which]
    return f"set {ENVIRONMENT[which]}=URL, or for an image {option} URL or {key} of the recipe"
