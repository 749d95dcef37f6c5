# SPDX-License-Identifier: Apache-2.0
"""Signatures of images, made and checked by the real ssh-keygen, and what a policy makes of them."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from site_catalog import publish

from vhpc_slurm.catalog import FolderCatalog, edit
from vhpc_slurm.cli.main import main
from vhpc_slurm.config import Config
from vhpc_slurm.config.images import Images
from vhpc_slurm.config.network import Network
from vhpc_slurm.config.policy import Rule
from vhpc_slurm.controller.leases.jobimage import look_up
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.model import ImageIdentity, ImageRef, JobRequest
from vhpc_slurm.policy import check, signatures


@dataclass
class Site:
    """A catalogue with the image ``base``, and keys of the principals ops and eve."""

    folder: Path
    images: Images

    @property
    def catalog(self) -> Path:
        return self.folder / "catalog"

    @property
    def image(self) -> ImageIdentity:
        return FolderCatalog(self.catalog).resolve(ImageRef("base"))

    @property
    def manifest(self) -> bytes:
        return FolderCatalog(self.catalog).read_signed(self.image).manifest

    def key(self, name: str) -> Path:
        path = self.folder / name
        if not path.exists():
            keygen("-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(path))
        return path

    def allow(self, *lines: str) -> None:
        """Each line has ``{NAME}`` in place of the public key of NAME."""
        keys = {name: self.key(name).with_suffix(".pub").read_text().strip() for name in ("ops", "eve", "ca")}
        text = "".join(f"{line.format(**keys)}\n" for line in lines)
        Path(self.images.allowed_signers).write_text(text)

    def add(self, *made: bytes) -> None:
        for one in made:
            edit.add_signature(self.catalog, self.image, one)

    def signers(self) -> signatures.Signers:
        return signatures.check(self.images, FolderCatalog(self.catalog).read_signed(self.image))

    def config(self, *rules: Rule) -> Config:
        return Config(images=self.images, policy=rules)


def keygen(*arguments: str, stdin: bytes = b"") -> bytes:
    return subprocess.run(["ssh-keygen", *arguments], input=stdin, capture_output=True, check=True).stdout


def signed(key: Path, data: bytes, namespace: str = "vhpc-image") -> bytes:
    return keygen("-Y", "sign", "-q", "-n", namespace, "-f", str(key), stdin=data)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    found = Site(
        tmp_path, Images(catalog=str(tmp_path / "catalog"), allowed_signers=str(tmp_path / "allowed_signers"))
    )
    publish(found.catalog, "base", b"root")
    found.allow("ops@hpc.example {ops}")
    return found


def request(image: str = "base", network: str | None = None, partition: str = "main") -> JobRequest:
    return JobRequest(
        1, 0, os.getuid(), 7, "alice", "/w", ImageRef.parse(image), partition=partition, network=network
    )


def test_a_signature_of_an_allowed_key_names_its_principal(site: Site) -> None:
    assert site.signers() == signatures.Signers(())
    site.add(signed(site.key("ops"), site.manifest))
    assert site.signers() == signatures.Signers(("ops@hpc.example",))
    assert site.catalog.joinpath("signatures/sha256", site.image.digest[7:]).stat().st_mode & 0o777 == 0o644


def test_several_people_can_sign_and_one_key_can_be_of_several(site: Site) -> None:
    site.allow("ops@hpc.example,root@hpc.example {ops}", "eve {eve}")
    site.add(signed(site.key("ops"), site.manifest), signed(site.key("eve"), site.manifest))
    assert set(site.signers().principals) == {"ops@hpc.example", "root@hpc.example", "eve"}


def test_a_certificate_of_an_allowed_authority_counts(site: Site) -> None:
    eve = site.key("eve")
    keygen("-q", "-s", str(site.key("ca")), "-I", "eve", "-n", "eve@hpc.example", f"{eve}.pub")
    site.allow("*@hpc.example cert-authority {ca}")
    site.add(signed(Path(f"{eve}-cert.pub"), site.manifest))
    assert site.signers().principals == ("eve@hpc.example",)


@pytest.mark.promise("attack.policy")
@pytest.mark.parametrize(
    ("allowed", "data", "namespace", "why"),
    [
        ("ops {eve}", None, "vhpc-image", "a key that images.allowed_signers does not have"),
        ('ops valid-before="20200101" {ops}', None, "vhpc-image", "key has expired"),
        ('ops valid-after="20990101" {ops}', None, "vhpc-image", "key is not yet valid"),
        ('ops namespaces="git" {ops}', None, "vhpc-image", "not permitted"),
        ("ops {ops}", b"other bytes", "vhpc-image", "incorrect signature"),
        ("ops {ops}", None, "file", "namespace"),
        ("# nobody", None, "vhpc-image", "a key that images.allowed_signers does not have"),
    ],
    ids=["unknown key", "expired", "not yet valid", "namespaces", "other bytes", "namespace", "nobody"],
)
def test_an_invalid_signature_has_its_reason(
    site: Site, allowed: str, data: bytes | None, namespace: str, why: str
) -> None:
    site.allow(allowed)
    site.add(signed(site.key("ops"), data or site.manifest, namespace))
    found = site.signers()
    assert found.principals == ()
    assert why in found.refused, found
    assert "\n" not in found.refused


@pytest.mark.promise("attack.policy")
def test_a_revoked_key_does_not_count(site: Site) -> None:
    site.add(signed(site.key("ops"), site.manifest))
    revoked = site.folder / "revoked"
    images = msgspec.structs.replace(site.images, revoked_signers=str(revoked))
    for lines, expected in (
        ("", ("ops@hpc.example",)),
        (site.key("ops").with_suffix(".pub").read_text(), ()),
    ):
        revoked.write_text(lines)
        found = signatures.check(images, FolderCatalog(site.catalog).read_signed(site.image))
        assert found.principals == expected
    assert "revoked" in found.refused


@pytest.mark.promise("attack.policy")
def test_a_valid_signature_counts_among_rubbish(site: Site) -> None:
    good = signed(site.key("ops"), site.manifest)
    path = site.catalog / "signatures/sha256" / site.image.digest[7:]
    path.parent.mkdir(parents=True)
    for before, after in (
        (b"\0\xff\n" * 1000, b""),
        (good[:-40], b""),
        (b"", b"-----BEGIN SSH SIGNATURE-----\n"),
    ):
        path.write_bytes(before + good + after)
        assert site.signers().principals == ("ops@hpc.example",), before[:20]
    path.write_bytes(b"-----BEGIN SSH SIGNATURE-----\nAAAA\n-----END SSH SIGNATURE-----\n" * 1000 + good)
    found = site.signers()
    assert found.principals == (), "only some are looked at"
    assert found.refused


@pytest.mark.promise("attack.policy")
def test_without_the_sites_files_nothing_counts_as_checked(site: Site) -> None:
    site.add(signed(site.key("ops"), site.manifest))
    for images in (
        msgspec.structs.replace(site.images, allowed_signers=str(site.folder / "no")),
        msgspec.structs.replace(site.images, revoked_signers=str(site.folder / "no")),
    ):
        with pytest.raises(FabricError, match="no: it does not exist"):
            signatures.check(images, FolderCatalog(site.catalog).read_signed(site.image))


def test_missing_ssh_keygen_is_reported(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.add(signed(site.key("ops"), site.manifest))
    monkeypatch.setattr(signatures, "SEARCH", str(site.folder))
    with pytest.raises(FabricError, match="has no ssh-keygen"):
        site.signers()


def test_the_same_signature_is_kept_once(site: Site) -> None:
    made = signed(site.key("ops"), site.manifest)
    assert edit.add_signature(site.catalog, site.image, made)
    assert not edit.add_signature(site.catalog, site.image, made)
    site.catalog.joinpath("signatures/sha256", site.image.digest[7:]).write_bytes(b"x" * (65536 - 10))
    with pytest.raises(UserError, match="too many signatures"):
        edit.add_signature(site.catalog, site.image, made)


def test_gc_deletes_the_signatures_of_deleted_images(site: Site) -> None:
    site.add(signed(site.key("ops"), site.manifest))
    assert edit.collect(site.catalog, 0).removed == ()
    (digest,) = edit.remove(site.catalog, ImageRef("base"))
    planned = edit.collect(site.catalog, 0, dry_run=True).removed
    assert planned == edit.collect(site.catalog, 0).removed
    assert {item.kind for item in planned} == {"manifest", "blob", "signature"}
    assert not site.catalog.joinpath("signatures/sha256", digest[7:]).exists()


OPS = Rule(name="signed only", partitions=("main",), signers=("ops@*",), networks=("none", "job"))


def test_a_job_needs_the_signatures_of_its_rule(site: Site) -> None:
    config = site.config(OPS)
    with pytest.raises(UserError) as caught:
        check(config, request(), site.image)
    assert caught.value.line() == (
        "policy rule 'signed only' does not permit image base:latest: the image needs a signature of ops@*"
    )
    check(config, request(partition="other"), site.image)
    site.add(signed(site.key("eve"), site.manifest))
    with pytest.raises(UserError, match=r"images\.allowed_signers does not have"):
        check(config, request(), site.image)
    site.add(signed(site.key("ops"), site.manifest))
    check(config, request(), site.image)


@pytest.mark.promise("attack.policy")
def test_a_permitted_name_with_a_digest_permits_nothing(site: Site) -> None:
    other = publish(site.catalog, "other", b"another root")
    config = site.config(Rule(name="base only", images=("base:*",)))
    assert look_up(config, request("base")) == site.image
    pinned = look_up(config, request(f"base@{site.image.digest}"))
    assert isinstance(pinned, ImageIdentity)
    forged = look_up(config, request(f"base@{other}"))
    assert isinstance(forged, UserError)
    assert "'base only' does not permit image base:latest@sha256:" in forged.line()
    edit.tag(site.catalog, ImageRef("other"), ImageRef("base", "2"))
    assert isinstance(look_up(config, request(f"base@{other}")), ImageIdentity)


def test_a_network_that_a_rule_forbids_is_refused(site: Site) -> None:
    config = msgspec.structs.replace(
        site.config(msgspec.structs.replace(OPS, signers=())),
        network=Network(allowed=("nat",), default="nat"),
    )
    for network in (None, "nat", "job,nat"):
        with pytest.raises(
            UserError, match="rule 'signed only' refuses the job: it does not permit network nat"
        ):
            check(config, request(network=network), site.image)
    check(config, request(network="job"), site.image)


def test_the_controller_refuses_the_lease(site: Site) -> None:
    found = look_up(site.config(OPS), request())
    assert isinstance(found, UserError)
    assert "policy rule 'signed only'" in found.line()
    site.add(signed(site.key("ops"), site.manifest))
    assert look_up(site.config(OPS), request()) == site.image


def test_signatures_of_own_images_are_read_with_care(site: Site) -> None:
    images = msgspec.structs.replace(site.images, user_catalog=str(site.folder / "{user}/images"))
    own = site.folder / "alice/images"
    own.parent.mkdir()
    site.catalog.rename(own)
    config = msgspec.structs.replace(site.config(OPS), images=images)
    refused = look_up(config, request("own/base"))
    assert isinstance(refused, UserError)
    image = FolderCatalog(own).resolve(ImageRef("base"))
    made = signed(site.key("ops"), FolderCatalog(own).read_signed(image).manifest)
    edit.add_signature(own, image, made)
    assert look_up(config, request("own/base")) == ImageIdentity(
        ImageRef("base", own=True), image.digest, image.manifest
    )
    path = own / "signatures/sha256" / image.digest[7:]
    path.rename(site.folder / "elsewhere")
    path.symlink_to(site.folder / "elsewhere")
    linked = look_up(config, request("own/base"))
    assert isinstance(linked, UserError)
    assert "links are not followed" in linked.line()


@pytest.fixture
def vhpc(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """The command's configuration has the site's images and one rule."""
    path = site.folder / "vhpc.toml"
    path.write_text(
        f'[images]\ncatalog = "{site.catalog}"\nallowed_signers = "{site.images.allowed_signers}"\n'
        '[[policy]]\nname = "gpu"\npartitions = ["gpu"]\nimages = ["base:*"]\nsigners = ["ops@*"]\n'
    )
    monkeypatch.setenv("VHPC_CONFIG", str(path))
    return site


def test_sign_and_verify_on_the_command_line(vhpc: Site, capsys: pytest.CaptureFixture[str]) -> None:
    publish(vhpc.catalog, "other", b"another root")
    assert main(["image", "verify"]) == 0
    assert main(["image", "verify", "--partition", "main"]) == 0
    capsys.readouterr()
    assert main(["image", "verify", "--for", "alice", "--partition", "gpu", "--json"]) == 1
    base, other = json.loads(capsys.readouterr().out)
    assert "policy rule 'gpu' does not permit image base:latest: the image needs" in base["problem"]
    assert "it permits base:*" in other["problem"]
    assert main(["image", "sign", "base", "--key", str(vhpc.key("ops"))]) == 0
    assert capsys.readouterr().out == f"base:latest {vhpc.image.digest}\n"
    assert main(["image", "verify", "base", "--partition", "gpu"]) == 0
    assert [line.split()[2:] for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["ops@hpc.example", "ok"]
    ]


def test_verify_judges_all_rules_that_may_apply(vhpc: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """Account and QOS are not given: the lease would refuse jobs of an account that the rules name."""
    with (vhpc.folder / "vhpc.toml").open("a") as file:
        file.write(
            '[[policy]]\nname = "course"\naccounts = ["course-*"]\nimages = ["debian-*"]\n'
            '[[policy]]\nname = "night"\nqos = ["night"]\n'
        )
    assert main(["image", "verify", "base", "--for", "alice", "--partition", "main"]) == 0
    (line,) = capsys.readouterr().out.splitlines()[1:]
    assert line.split(maxsplit=3)[3] == (
        "depends: permitted where rule 'night' or no rule applies; if account is course-*: "
        "policy rule 'course' does not permit image base:latest: it permits debian-*"
    )
    known = ["image", "verify", "base", "--for", "alice", "--partition", "main", "--json", "--account"]
    assert main([*known, "course-1"]) == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert row["problem"] == "policy rule 'course' does not permit image base:latest: it permits debian-*"
    assert main([*known, ""]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["rules"] == [
        {"rule": "night", "condition": "QOS is night", "refusal": None},
        {"rule": None, "condition": "", "refusal": None},
    ]
    assert main(["image", "verify", "base", "--account", "course-1"]) == 1, "the partition may be gpu or not"


def test_a_signature_can_be_made_elsewhere(vhpc: Site, capsys: pytest.CaptureFixture[str]) -> None:
    path = vhpc.folder / "manifest.sig"
    path.write_bytes(signed(vhpc.key("ops"), vhpc.manifest))
    assert main(["image", "sign", "base", "--signature", str(path)]) == 0
    assert main(["image", "sign", "base", "--signature", str(path)]) == 0
    assert "it had this signature before" in capsys.readouterr().out
    assert vhpc.signers().principals == ("ops@hpc.example",)


def test_a_failed_signing_is_one_line(vhpc: Site, capsys: pytest.CaptureFixture[str]) -> None:
    text = vhpc.folder / "text"
    text.write_text("x\n")
    for arguments, says in (
        (["--key", str(vhpc.folder / "none")], "cannot sign with"),
        (["--key", str(text)], "cannot sign with"),
        (["--signature", str(text)], "is not one signature: BEGIN SSH SIGNATURE is expected once"),
        (["--signature", str(vhpc.folder / "none")], "No such file"),
        ([], "one of --key and --signature is needed"),
    ):
        assert main(["image", "sign", "base", *arguments]) in {1, 2}
        said = capsys.readouterr().err
        assert says in said, arguments
    assert not (vhpc.catalog / "signatures").exists()
