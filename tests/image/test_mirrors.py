# SPDX-License-Identifier: Apache-2.0
"""Mirrors from APT's configuration, in the formats that Debian's and others' systems have it in."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from vmimages.errors import BuildError
from vmimages.mirrors import Mirrors, choose, configured, sources

CHECKOUT = Path(__file__).parents[2]
needs_apt = pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs apt-get: run on Debian")

# /etc/apt/sources.list as Debian's installer leaves it, with the CD's line and its comments
INSTALLER = """\
deb cdrom:[Debian GNU/Linux 12.5.0 _Bookworm_ - Official amd64 NETINST 20240210-11:27]/ bookworm main

#deb http://old.example/debian bookworm main
deb http://ftp.site.example/debian/ bookworm main non-free-firmware
deb-src http://ftp.site.example/src/debian/ bookworm main non-free-firmware

deb http://security.site.example/debian-security bookworm-security main non-free-firmware
deb http://ftp.site.example/debian/ bookworm-updates main non-free-firmware
"""
# sources.list.d/debian.sources as in Debian's container images
CONTAINER = """\
Types: deb
# http://snapshot.example/archive/debian/20250520T000000Z
URIs: http://deb.site.example/debian
Suites: trixie trixie-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://deb.site.example/debian-security
Suites: trixie-security
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""
# the same as in Debian's cloud images, whose mirrors are listed in files of their own
CLOUD = """\
Types: deb deb-src
URIs: mirror+file://{etc}/mirrors/debian.list
Suites: bookworm bookworm-updates bookworm-backports
Components: main

Types: deb deb-src
URIs: mirror+file://{etc}/mirrors/debian-security.list
Suites: bookworm-security
Components: main
"""
UBUNTU = """\
Types: deb
URIs: http://archive.ubuntu.example/ubuntu/
Suites: noble noble-updates noble-backports
Components: main universe restricted multiverse
Signed-By: /usr/share/keyrings/ubuntu-archive-keyring.gpg

Types: deb
URIs: http://security.ubuntu.example/ubuntu/
Suites: noble-security
Components: main universe restricted multiverse
"""
# repositories of others, as their makers tell users to configure them
OTHERS = """\
deb [arch=amd64 signed-by=/etc/docker.asc] https://download.docker.example/linux/debian bookworm stable
deb [signed-by=/usr/share/keyrings/a.gpg] https://apt.hashicorp.example bookworm main
deb https://apt.postgresql.example/pub/repos/apt bookworm-pgdg main
deb https://packages.microsoft.example/debian/12/prod bookworm main
deb https://nvidia.example/libnvidia-container/stable/deb/$(ARCH) /
"""


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    folder = tmp_path / "apt"
    (folder / "sources.list.d").mkdir(parents=True)
    (folder / "mirrors").mkdir()
    return folder


@needs_apt
@pytest.mark.parametrize(
    ("name", "text", "archive", "security"),
    [
        (
            "sources.list",
            INSTALLER,
            "http://ftp.site.example/debian",
            "http://security.site.example/debian-security",
        ),
        (
            "sources.list.d/debian.sources",
            CONTAINER,
            "http://deb.site.example/debian",
            "http://deb.site.example/debian-security",
        ),
        (
            "sources.list.d/debian.list",
            "deb https://snapshot.example/archive/debian/20250520T000000Z/ sid main contrib\n"
            "deb https://snapshot.example/archive/debian-security/20250520T000000Z/ bullseye/updates main\n",
            "https://snapshot.example/archive/debian/20250520T000000Z",
            "https://snapshot.example/archive/debian-security/20250520T000000Z",
        ),
    ],
    ids=["installer", "container", "snapshot"],
)
@pytest.mark.parametrize("suite", ["bookworm", "trixie"])
def test_mirrors_are_those_of_the_host(
    etc: Path, name: str, text: str, archive: str, security: str, suite: str
) -> None:
    (etc / name).write_text(text)
    assert choose(suite, etc=etc) == Mirrors(archive, security)


@needs_apt
def test_a_list_of_mirrors_in_a_file_is_followed(etc: Path) -> None:
    (etc / "sources.list.d/debian.sources").write_text(CLOUD.format(etc=etc))
    (etc / "mirrors/debian.list").write_text("file:/srv/debian\nhttp://a.example/debian/\tpriority:1\n")
    (etc / "mirrors/debian-security.list").write_text("https://b.example/debian-security\n")
    assert choose("trixie", etc=etc) == Mirrors(
        "http://a.example/debian", "https://b.example/debian-security"
    )


@needs_apt
@pytest.mark.parametrize("first", ["a", "z"])
def test_repositories_of_others_are_not_taken_for_the_archive(etc: Path, first: str) -> None:
    (etc / f"sources.list.d/{first}.list").write_text(OTHERS)
    (etc / "sources.list.d/debian.sources").write_text(CONTAINER)
    assert choose("bookworm", etc=etc).archive == "http://deb.site.example/debian"


@needs_apt
def test_a_source_of_the_suite_itself_comes_first(etc: Path) -> None:
    (etc / "sources.list").write_text(INSTALLER)
    (etc / "sources.list.d/debian.sources").write_text(CONTAINER)
    assert choose("bookworm", etc=etc).archive == "http://ftp.site.example/debian"
    assert choose("trixie", etc=etc).archive == "http://deb.site.example/debian"
    assert choose("trixie", etc=etc).security == "http://deb.site.example/debian-security"


@needs_apt
def test_a_source_that_is_switched_off_does_not_count(etc: Path) -> None:
    first, rest = CONTAINER.split("\n\n")
    (etc / "sources.list.d/debian.sources").write_text(f"Enabled: no\n{first}\n\n{rest}")
    (etc / "sources.list.d/old.list.save").write_text(INSTALLER)
    with pytest.raises(BuildError, match="no Debian mirror is known"):
        choose("trixie", etc=etc)


@needs_apt
def test_named_mirrors_come_before_configured_ones(etc: Path) -> None:
    (etc / "sources.list").write_text(INSTALLER)
    assert choose("trixie", "http://x.example/d/", etc=etc) == Mirrors(
        "http://x.example/d", "http://security.site.example/debian-security"
    )
    assert choose("trixie", "", "http://x.example/s", etc=etc) == Mirrors(
        "http://ftp.site.example/debian", "http://x.example/s"
    )


def test_apt_is_not_needed_if_both_mirrors_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert choose("trixie", "http://a.example", "http://b.example").archive == "http://a.example"
    assert choose("sid", "http://a.example") == Mirrors("http://a.example")
    with pytest.raises(BuildError, match=r"this host has no APT.*VHPC_MIRROR=URL.*--mirror"):
        choose("trixie")


@needs_apt
@pytest.mark.parametrize(
    ("text", "what"),
    [
        (UBUNTU, r"no Debian mirror is known.*has: http://archive\.ubuntu\.example/ubuntu noble,.*--mirror"),
        ("", r"no Debian mirror is known.*it has no sources.*debian\.mirror in the recipe"),
        (
            CONTAINER.partition("\n\n")[0],
            r"no mirror of Debian's security updates is known.*VHPC_SECURITY_MIRROR=URL.*--security-mirror",
        ),
    ],
    ids=["another distribution", "nothing", "no security updates"],
)  # fmt: skip
def test_a_missing_mirror_is_reported_with_its_option(etc: Path, text: str, what: str) -> None:
    (etc / "sources.list.d/x.sources").write_text(text)
    with pytest.raises(BuildError, match=what):
        choose("trixie", etc=etc)


@needs_apt
def test_a_damaged_configuration_is_reported_with_apts_text(etc: Path) -> None:
    (etc / "sources.list").write_text("deb http://x.example/debian\n")
    with pytest.raises(BuildError, match=r"APT cannot read its configuration.*Malformed entry 1.*correct it"):
        choose("trixie", etc=etc)


@needs_apt
def test_apt_downloads_from_the_mirrors_that_were_read(etc: Path) -> None:
    (etc / "sources.list").write_text(INSTALLER)
    argv = ["apt-get", "update", "--print-uris", "-o", f"Dir::Etc={etc}", "-o", f"Dir::State::lists={etc}/l"]
    printed = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout
    releases = re.findall(r"'(http\S+)/dists/(\S+)/InRelease'", printed)
    releases.remove(("http://ftp.site.example/src/debian", "bookworm"))  # source packages
    ours = {(one.url, one.release) for one in configured(etc) if one.url.startswith("http")}
    assert ours == set(releases)
    assert len(ours) == 3


def test_lines_of_a_suite_have_its_updates() -> None:
    mirrors = Mirrors("http://a.example/debian", "http://b.example/debian-security")
    assert sources("trixie", mirrors, ("main", "contrib")) == [
        "deb http://a.example/debian trixie main contrib",
        "deb http://a.example/debian trixie-updates main contrib",
        "deb http://b.example/debian-security trixie-security main contrib",
    ]
    assert sources("sid", Mirrors("http://a.example/debian")) == ["deb http://a.example/debian sid main"]


def test_no_mirror_is_built_in() -> None:
    """Neither the builder, the lab nor their scripts name a host of packages."""
    folders = ("vmimages", "lab", "scripts")
    texts = {
        str(path.relative_to(CHECKOUT)): path.read_text(encoding="utf-8")
        for folder in folders
        for path in (CHECKOUT / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    named = [name for name, text in texts.items() if re.search(r"(?:deb|ftp|snapshot)\.debian\.org", text)]
    assert named == []
    assert len(texts) > 50
