# SPDX-License-Identifier: Apache-2.0
"""vhpc image tag, rm, sign, verify, gc: changes to a catalogue, and checks of all its bytes."""
# Decision: Deleting images takes two runs

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from vhpc_slurm.catalog import FolderCatalog, edit, with_list
from vhpc_slurm.catalog.armour import split
from vhpc_slurm.catalog.folder import SIGNATURES_SIZE
from vhpc_slurm.cli import context, options, output
from vhpc_slurm.cli.options import CatalogFolder, ImageArgument, Json, Own
from vhpc_slurm.cli.progress import progress
from vhpc_slurm.cli.site.policy import unknown
from vhpc_slurm.config import Config
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import ImageIdentity, ImageRef
from vhpc_slurm.policy import Subject, check_image, possible, signatures
from vhpc_slurm.progress import counter


def tag(
    source: ImageArgument,
    target: Annotated[str, typer.Argument(metavar="[own/]NEW[:TAG]", show_default=False)],
    catalog: CatalogFolder = None,
    as_json: Json = False,
) -> int:
    """Let the name NEW point to an image (owner of the catalogue)."""
    where = options.catalog(options.config(), catalog, source, target)
    images = edit.tag(where.path, ImageRef.parse(source), ImageRef.parse(target))
    for image in () if as_json else images:
        print(f"{image.ref} {image.digest}")
    if as_json:
        found = [{"image": str(image.ref), "digest": image.digest} for image in images]
        output.write_json(found[0] if len(found) == 1 else found)
    return 0


def rm(
    names: Annotated[list[str], typer.Argument(metavar="[own/]NAME[:TAG]...", show_default=False)],
    catalog: CatalogFolder = None,
    as_json: Json = False,
) -> int:
    """Remove names (owner of the catalogue); vhpc image gc deletes images that have lost their last one."""
    where = options.catalog(options.config(), catalog, *names)
    wanted = [ImageRef.parse(name) for name in names]
    known = {(ref.name, ref.tag) for ref in where.refs()}
    for ref in wanted:
        if not ref.digest and (ref.name, ref.tag) not in known:
            raise UserError(f"the catalogue has no image {ref}", "", "see: vhpc image ls")
    done = [
        {"image": str(ref), "digest": digest}
        for ref in wanted
        for digest in edit.remove(where.path, ref) or (None,)
    ]
    if as_json:
        output.write_json(done)
        return 0
    for row in done:
        print(f"removed {row['image']} ({row['digest'] or 'it had no digest'})")
    return 0


def verify(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[[own/]NAME[:TAG][@DIGEST]...]", help="Default: all.", show_default=False),
    ] = None,
    user: Annotated[
        str,
        typer.Option(
            "--for", metavar="USER", help="Also check the policy, for jobs of USER.", show_default=False
        ),
    ] = "",
    partition: Annotated[
        str | None, typer.Option("--partition", help="The same for jobs of a partition.", show_default=False)
    ] = None,
    account: Annotated[
        str | None, typer.Option("--account", help="The same for jobs of an account.", show_default=False)
    ] = None,
    qos: Annotated[
        str | None, typer.Option("--qos", help="The same for jobs of a QOS.", show_default=False)
    ] = None,
    own: Own = False,
    catalog: CatalogFolder = None,
    as_json: Json = False,
) -> int:
    """Compare all bytes of images with their digests, and show who has signed them.

    With --for, --partition, --account or --qos, images are also compared with the policy: with all
    rules that may apply, where something of the job is not given. The exit status is 1 if an image is
    broken, or permitted by none of them.
    """
    config = options.config()
    where = options.catalog(config, catalog, *(names or ()), own=own)
    subject = None
    if user or any(given is not None for given in (partition, account, qos)):
        subject = Subject(user or context.user_name(), partition, account, qos)
    wanted = [ImageRef.parse(name) for name in names or ()]
    wanted = wanted or [replace(ref, own=own) for ref in where.refs()]
    sound: set[tuple[str, int]] = set()
    count = counter(progress, "verified", _total(where, wanted))
    results: list[dict[str, Any]] = []
    for ref, one in _each(where, wanted):
        row: dict[str, Any] = dict.fromkeys(("digest", "signers", "problem", "rules"))
        row = {"image": str(ref)} | row
        results.append(row)
        try:
            image = one or where.resolve(ref)
            _verify(where, image, sound, count)
            row["digest"] = image.digest
            if config.images.allowed_signers:
                row["signers"] = signatures.check(config.images, where.read_signed(image)).principals
            if subject is not None:
                row["rules"] = _judged(config, subject, image, where)
                row["problem"] = _refusal(row["rules"])
        except UserError as err:
            row["problem"] = err.line()
    if as_json:
        output.write_json(results)
    else:
        output.write_table(("IMAGE", "DIGEST", "SIGNED BY", "RESULT"), [_result(row) for row in results])
    return int(any(row["problem"] for row in results))


def _result(row: dict[str, Any]) -> tuple[str, str, str, str]:
    result = row["problem"] or _permission(row["rules"] or [])
    return row["image"], row["digest"] or "-", ", ".join(row["signers"] or ()) or "-", result


def _judged(
    config: Config, subject: Subject, image: ImageIdentity, catalog: FolderCatalog
) -> list[dict[str, str | None]]:
    """Results of an image by each rule that may apply; the rule None stands for no rule."""
    rows = []
    for rule in possible(config.policy, subject):
        refusal = None
        try:
            if rule is not None:
                check_image(config, rule, image, catalog)
        except UserError as err:
            refusal = err.line()
        name, condition = (None, "") if rule is None else (rule.name, unknown(rule, subject))
        rows.append({"rule": name, "condition": condition, "refusal": refusal})
    return rows


def _refusal(rules: list[dict[str, str | None]]) -> str | None:
    """Why an image is refused by all rules; None if one permits it."""
    refusals = [rule["refusal"] for rule in rules]
    if not all(refusals):
        return None
    return "; ".join(dict.fromkeys(str(refusal) for refusal in refusals))


def _permission(rules: list[dict[str, str | None]]) -> str:
    """Which rules permit an image, and which do not; ``ok`` if all do."""
    refused = [rule for rule in rules if rule["refusal"]]
    if not refused:
        return "ok"
    names = [f"rule {rule['rule']!r}" if rule["rule"] else "no rule" for rule in rules if not rule["refusal"]]
    cases = [
        f"if {rule['condition']}: {rule['refusal']}" if rule["condition"] else f"otherwise: {rule['refusal']}"
        for rule in refused
    ]
    return f"depends: permitted where {' or '.join(names)} applies; {'; '.join(cases)}"


def sign(
    name: ImageArgument,
    key: Annotated[
        Path | None,
        typer.Option(
            "--key",
            metavar="FILE",
            help="Private key, or the public key of one in the ssh-agent; ssh-keygen(1) makes the signature.",
            show_default=False,
        ),
    ] = None,
    signature: Annotated[
        Path | None,
        typer.Option(
            "--signature", metavar="FILE", help="A signature that was made elsewhere.", show_default=False
        ),
    ] = None,
    catalog: CatalogFolder = None,
    as_json: Json = False,
) -> int:
    """Add a signature to an image (owner of the catalogue)."""
    if (key is None) == (signature is None):
        raise typer.BadParameter("one of --key and --signature is needed")
    where = options.catalog(options.config(), catalog, name)
    image = where.resolve(ImageRef.parse(name))
    if key is not None:
        made = signatures.sign(where.read_signed(image).manifest, key)
    else:
        assert signature is not None
        made = _signature(signature)
    added = edit.add_signature(where.path, image, made)
    if as_json:
        output.write_json({"image": str(image.ref), "digest": image.digest, "added": added})
    else:
        print(f"{image.ref} {image.digest}{'' if added else ' (it had this signature before)'}")
    return 0


def _signature(path: Path) -> bytes:
    """The signature in a file; UserError unless the file has exactly one."""
    try:
        with path.open("rb") as file:
            found = file.read(SIGNATURES_SIZE)
    except OSError as err:
        raise UserError(f"cannot read {path}", err.strerror or str(err)) from err
    parts = split(found)
    if len(parts) != 1:
        raise UserError(
            f"{path} is not one signature",
            "BEGIN SSH SIGNATURE is expected once",
            f"make it with: ssh-keygen -Y sign -n {signatures.NAMESPACE} -f KEY MANIFEST",
        )
    return parts[0]


def _each(
    catalog: FolderCatalog, wanted: Sequence[ImageRef]
) -> Iterator[tuple[ImageRef, ImageIdentity | None]]:
    """Each name with its images of all architectures; None: it cannot be resolved."""
    for ref in wanted:
        try:
            yield from ((ref, image) for image in catalog.all_of(ref))
        except UserError:
            yield ref, None


def _total(catalog: FolderCatalog, wanted: Sequence[ImageRef]) -> int:
    """Bytes of all blobs of images, each once."""
    found: dict[str, int] = {}
    for ref in wanted:
        with contextlib.suppress(UserError):  # the result has the error
            images = catalog.all_of(ref)
            found |= {blob.sha256: blob.size for image in images for blob in with_list(image.manifest)}
    return sum(found.values())


def _verify(
    catalog: FolderCatalog, image: ImageIdentity, sound: set[tuple[str, int]], count: Callable[[int], None]
) -> None:
    """UserError unless all blobs, also the root's chunk list, are as the manifest says.

    ``sound`` has those that were read before.
    """
    for blob in with_list(image.manifest):
        if (blob.sha256, blob.size) not in sound:
            catalog.verify_blob(blob, str(image.ref), count)
            sound.add((blob.sha256, blob.size))


def gc(
    days: Annotated[
        float,
        typer.Option("--days", metavar="N", min=0, help="For how long images without a name are kept."),
    ] = 7.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing; show what would be deleted.")
    ] = False,
    own: Own = False,
    catalog: CatalogFolder = None,
    as_json: Json = False,
) -> int:
    """Delete images that have had no name for some days, and their blobs (owner of the catalogue).

    The first run that finds an image without a name starts the count of days; run it daily.
    """
    where = options.catalog(options.config(), catalog, own=own)
    found = edit.collect(where.path, days * 86400.0, dry_run=dry_run)
    freed = sum(item.size for item in found.removed)
    if as_json:
        output.write_json(
            {
                "removed": found.removed,
                "freed": freed,
                "waiting": [{"digest": digest, "seconds": round(left)} for digest, left in found.waiting],
                "broken": found.broken,
                "dry_run": dry_run,
            }
        )
        return int(bool(found.broken))
    verb = "would be deleted" if dry_run else "deleted"
    for item in found.removed:
        print(f"{verb}: {item.kind} {item.name} ({output.size(item.size)})")
    for digest, left in found.waiting:
        print(f"kept for {output.span(left)}: {digest}, which has no name")
    for line in found.broken:
        print(f"no blob is deleted, because one may need it: {line}")
    print(f"{output.size(freed)} {'would be freed' if dry_run else 'freed'}")
    return int(bool(found.broken))
