"""Take the best configuration out of a search, with its weights: `python -m tunediff.export NAME`.

With --diffusers FOLDER the model becomes a pipeline for `diffusers.DDPMPipeline.from_pretrained(FOLDER)`; NAME may then
also be a training folder, NAME/t0003 or a file of weights.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tunediff import cli
from tunediff.config import ConfigError
from tunediff.reporting import results, saved
from tunediff.reporting.export import choose, export
from tunediff.reporting.saved import Saved
from tunediff.workloads.diffusion import handoff


def main(argv: Sequence[str] | None = None) -> int:
    """Export a trial; see `--help`."""
    return cli.guarded(_main, argv)


def _main(argv: Sequence[str] | None) -> int:
    parser = cli.parser("export", __doc__ or "")
    parser.add_argument("name", help="name of the search")
    parser.add_argument(
        "--storage", type=Path, default=cli.STORAGE, help="folder of all searches (default: %(default)s)"
    )
    parser.add_argument("--trial", help="export this trial (default: the best)")
    parser.add_argument("--to", type=Path, help="YAML file to write (default: best.yaml in the folder of the search)")
    parser.add_argument(
        "--diffusers", type=Path, metavar="FOLDER", help="new folder for a pipeline; without --to, no YAML is written"
    )
    args = parser.parse_args(argv)
    model = _model(args) if args.diffusers is not None else None
    if args.diffusers is None or args.to is not None:
        _export_configuration(args)
    if model is not None:
        _export_pipeline(model, args.diffusers)
    return cli.OK


def _export_configuration(args: argparse.Namespace) -> None:
    found = results.read((args.storage / args.name).absolute())
    trial = choose(found, args.trial)
    to = args.to or args.storage / args.name / (f"{args.trial}.yaml" if args.trial else "best.yaml")
    if to.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--to: {str(to)!r} is not allowed; allowed: a file name that ends in .yaml")
    try:
        written = export(found, trial, to)
    except OSError as error:
        raise ConfigError(f"--to: {to} cannot be written: {error.strerror}") from None
    print(f"trial: {trial.name}")
    for kind, path in written.items():
        print(f"{kind}: {path}")
    print(f"train: python -m tunediff.train --config {to} --budget {trial.budget_s or 60:.10g}s")


def _model(args: argparse.Namespace) -> Saved:
    """The model for `--diffusers`. Refuses what could not be written before anything is."""
    what = args.name
    if args.trial is not None:
        found = results.read((args.storage / args.name).absolute())
        what = str(found.folder / "trials" / choose(found, args.trial).name)
    model = saved.find(what, args.storage)
    handoff.check(args.diffusers, model.config)
    return model


def _export_pipeline(model: Saved, folder: Path) -> None:
    try:
        handoff.write_pipeline(folder, model.config, model.network("cpu").state_dict())
    except OSError as error:
        raise ConfigError(f"--diffusers: {folder} cannot be written: {error.strerror}") from None
    print(f"model: {model.name}")
    print(f"pipeline: {folder}")
    print(f"sample: diffusers.DDPMPipeline.from_pretrained(…)(num_inference_steps={model.config.process.steps})")


if __name__ == "__main__":
    sys.exit(main())
