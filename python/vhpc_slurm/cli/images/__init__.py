# SPDX-License-Identifier: Apache-2.0
"""vhpc image: the images of the site, and those of a user."""

from vhpc_slurm.cli.verbs import PASS_OPTIONS, Group, Verb

GROUP = Group(
    Verb("ls", "images.listing:ls", "List the images of the site; with --own, yours."),
    Verb(
        "show",
        "images.listing:show",
        "Show one image: its digest, what its manifest says, and its blobs.",
    ),
    Verb(
        "import",
        "images.imports:import_",
        "Make an image of a container or of a file tree (owner of the catalogue).",
    ),
    Verb(
        "resolve",
        "images.imports:resolve",
        "Print the image of a source in your own catalogue, with its digest; import it if it is not there.",
    ),
    Verb("tag", "images.edit:tag", "Let the name NEW point to an image (owner of the catalogue)."),
    Verb(
        "rm",
        "images.edit:rm",
        "Remove names (owner of the catalogue); vhpc image gc deletes images that have lost their last one.",
    ),
    Verb(
        "verify",
        "images.edit:verify",
        "Compare all bytes of images with their digests, and show who has signed them.",
    ),
    Verb("sign", "images.edit:sign", "Add a signature to an image (owner of the catalogue)."),
    Verb(
        "gc",
        "images.edit:gc",
        "Delete images that have had no name for some days, and their blobs (owner of the catalogue).",
    ),
    Verb(
        "names",
        "images.names:names",
        "Print the names of the images that you may use here: those of the site, and your own.",
    ),
    Verb("push", "images.registry:push", "Put an image, with its signatures, into an OCI registry."),
    Verb(
        "pull",
        "images.registry:pull",
        "Get an image that vhpc image push has put into a registry (owner of the catalogue).",
    ),
    Verb(
        "diff",
        "images.diff:diff",
        "Show what differs between two images: their manifests, and the files of their roots.",
    ),
    Verb(
        "build",
        "images.build:build",
        "Build an image from a recipe: a Debian system, its kernel, and the guest agent.",
    ),
    Verb(
        "stage",
        "images.stage:stage",
        "Copy an image of the site into the store of this node, as Prolog does when a job starts (root).",
    ),
    Verb(
        "warm",
        "images.stage:warm",
        "Copy an image of the site into the stores of nodes before jobs need it (root).",
    ),
    Verb("run", "jobs.shell:shell", short_help="The same as vhpc shell.", settings=PASS_OPTIONS),
)
