# SPDX-License-Identifier: Apache-2.0
"""vhpc image tag, rm, sign, verify, gc: changes to a catalogue, and checks of all its bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from vhpc_slurm.catalog import edit, read_signed, refs, resolve, verify_blob, with_list
from vhpc_slurm.catalog.armour import split
from vhpc_slurm.catalog.folder import SIGNATURES_SIZE
from vhpc_slurm.cli import output
from vhpc_slurm.cli.progress import progress
from vhpc_slurm.cli.site.policy import unknown
from vhpc_slurm.config import Config
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import ImageIdentity, ImageRef
from vhpc_slurm.policy import Subject, check_image, possible, signatures
from vhpc_slurm.progress import counter


def tag(catalog: Path, source: str, target: str, *, as_json: bool) -> int:
    """Let another name point to an image; errors as ``edit.tag``."""
    image = edit.tag(catalog, ImageRef.parse(source), ImageRef.parse(target))
    if as_json:
        output.write_json({"image": str(image.ref), "digest": image.digest})
    else:
        print(f"{image.ref} {image.digest}")
    return 0


def rm(catalog: Path, names: Sequence[str], *, as_json: bool) -> int:
    """Remove names; errors as ``edit.remove``. All names are checked before the first is removed."""
    wanted = [ImageRef.parse(name) for name in names]
    known = {(ref.name, ref.tag) for ref in refs(catalog)}
    for ref in wanted:
        if not ref.digest and (ref.name, ref.tag) not in known:
            raise UserError(f"the catalogue has no image {ref}", "", "see: vhpc image ls")
    done = [{"image": str(ref), "digest": edit.remove(catalog, ref) or None} for ref in wanted]
    if as_json:
        output.write_json(done)
        return 0
    for row in done:
        print(f"removed {row['image']} ({row['digest'] or 'it had no digest'})")
    return 0


def verify(
    config: Config,
    catalog: Path,
    names: Sequence[str],
    subject: Subject | None = None,
    *,
    own: bool = False,
    as_json: bool,
) -> int:
    """Check manifest and blobs of images, by default of all, and who has signed them.

    Args:
        config: has the policy and the signers.
        catalog: the catalogue.
        names: images, as the user wrote them.
        subject: whether the policy permits the images to this one's jobs is checked, too, by all rules
            that may apply, as ``vhpc policy explain`` does.
        own: the catalogue is the user's own, so all its images are.
        as_json: print JSON.

    Returns:
        Exit status: 1 if one is broken, or refused whatever is not known of the subject.
    """
    wanted = [ImageRef.parse(name) for name in names]
    wanted = wanted or [replace(ref, own=own) for ref in refs(catalog)]
    sound: set[tuple[str, int]] = set()
    count = counter(progress, "verified", _total(catalog, wanted))
    results: list[dict[str, Any]] = []
    for ref in wanted:
        row: dict[str, Any] = dict.fromkeys(("digest", "signers", "problem", "rules"))
        row = {"image": str(ref)} | row
        results.append(row)
        try:
            image = resolve(catalog, ref)
            _verify(catalog, image, sound, count)
            row["digest"] = image.digest
            if config.images.allowed_signers:
                row["signers"] = signatures.check(config.images, read_signed(catalog, image)).principals
            if subject is not None:
                row["rules"] = _judged(config, subject, image, catalog)
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
    config: Config, subject: Subject, image: ImageIdentity, catalog: Path
) -> list[dict[str, str | None]]:
    """What each rule that may apply says of an image; the rule None stands for none."""
    rows = []
    for rule in possible(config.policy, subject):
        refusal = None
        try:
            if rule is not None:
                check_image(config, rule, image, catalog, partial(read_signed, catalog, image))
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


def sign(catalog: Path, name: str, key: Path | None, signature: Path | None, *, as_json: bool) -> int:
    """Add a signature to an image: made with a key, or read from a file.

    Raises:
        UserError: no such image, a key that cannot sign, or a catalogue that cannot be changed.
    """
    image = resolve(catalog, ImageRef.parse(name))
    if key is not None:
        made = signatures.sign(read_signed(catalog, image).manifest, key)
    else:
        assert signature is not None
        made = _signature(signature)
    added = edit.add_signature(catalog, image, made)
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


def _total(catalog: Path, wanted: Sequence[ImageRef]) -> int:
    """Bytes of all blobs of images, each once."""
    found: dict[str, int] = {}
    for ref in wanted:
        with contextlib.suppress(UserError):  # the result has the error
            found |= {blob.sha256: blob.size for blob in with_list(resolve(catalog, ref).manifest)}
    return sum(found.values())


def _verify(
    catalog: Path, image: ImageIdentity, sound: set[tuple[str, int]], count: Callable[[int], None]
) -> None:
    """UserError unless all blobs, also the root's chunk list, are as the manifest says.

    ``sound`` has those that were read before.
    """
    for blob in with_list(image.manifest):
        if (blob.sha256, blob.size) not in sound:
            verify_blob(catalog, blob, str(image.ref), count)
            sound.add((blob.sha256, blob.size))


def gc(catalog: Path, days: float, *, dry_run: bool, as_json: bool) -> int:
    """Delete images without a name; exit status 1 if a manifest is broken. Errors as ``edit.collect``."""
    found = edit.collect(catalog, days * 86400.0, dry_run=dry_run)
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
