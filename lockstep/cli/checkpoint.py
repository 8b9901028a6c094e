"""``lockstep checkpoint``: lists, verifies and exports the checkpoints of a training.

The exit status of ``verify`` is 1 if a checkpoint is damaged, and 0 if all are complete.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lockstep.checkpoint.exporting import export_dcp, export_safetensors
from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.reading import found_generations, read_generation, read_manifest
from lockstep.checkpoint.storage import Folder, folder_of
from lockstep.errors import CheckpointError
from lockstep.formatting import format_bytes, format_count

_PATH_HELP = "folder or URL that fit(checkpoint=...) has written to, or one checkpoint in it"
_FORMATS = {"safetensors": export_safetensors, "dcp": export_dcp}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, summary in (
        ("show", "list the checkpoints, the oldest first"),
        ("verify", "read every byte of them, and compare it with its hash"),
        ("export", "write the newest complete one in a format that other programs read"),
    ):
        action = actions.add_parser(name, help=summary, description=f"{summary.capitalize()}.")
        action.add_argument("path", type=folder_of, metavar="PATH", help=_PATH_HELP)
    action.add_argument("out", type=_path_here, metavar="OUT", help="file or folder to write")
    action.add_argument(
        "--format",
        choices=list(_FORMATS),
        default="safetensors",
        help="safetensors: the weights, as one file (the default); dcp: weights and optimizer, "
        "as a folder of torch.distributed.checkpoint",
    )


def _path_here(text: str) -> Path:
    path = folder_of(text)
    if not isinstance(path, Path):
        raise argparse.ArgumentTypeError(f"{text} must be a path on this machine, not a URL")
    return path


def run(options: argparse.Namespace) -> int:
    """Run the action.

    Raises:
        CheckpointError: there is no checkpoint, or none is complete.
    """
    console = Console(highlight=False, soft_wrap=True)
    if options.action == "export":
        _FORMATS[options.format](options.path, options.out)
        console.print(f"{options.out} is written.")
        return 0
    generations = found_generations(options.path)
    reasons = dict(_find_damage(generations, reads_all=options.action == "verify"))
    console.print(_table(generations, reasons, whole=_WHOLE[options.action]))
    for generation, reason in reasons.items():
        console.print(f"{generation.name}: {reason}", style="red", markup=False)
    return 1 if reasons and options.action == "verify" else 0


# The last column of an undamaged checkpoint: ``show`` has not read its tensors.
_WHOLE = {"show": "", "verify": "whole"}


def _find_damage(generations: list[Folder], *, reads_all: bool) -> Iterator[tuple[Folder, str]]:
    """The damaged checkpoints, each with the reason."""
    for generation in generations:
        try:
            (read_generation if reads_all else read_manifest)(generation)
        except (CheckpointError, OSError) as error:
            yield generation, str(error)


def _table(generations: list[Folder], reasons: dict[Folder, str], *, whole: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("checkpoint", "steps", "epochs", "trained by", "size", ""):
        table.add_column(name, justify="right" if name in ("steps", "epochs", "size") else "left")
    for generation in generations:
        if generation in reasons:
            table.add_row(generation.name, *[""] * 4, "damaged", style="red")
        else:
            table.add_row(generation.name, *_row(read_manifest(generation)), whole)
    return table


def _row(manifest: Manifest) -> list[str]:
    summary = manifest.summary
    trained_by = f"{summary.strategy} on {summary.num_devices}" if summary.num_devices else ""
    return [
        format_count(summary.step),
        f"{summary.epoch}{', the end' if summary.is_finished else ''}",
        trained_by,
        format_bytes(sum(file.size for file in manifest.files.values())),
    ]
