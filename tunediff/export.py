"""Take the best configuration out of a search, with its weights: `python -m tunediff.export NAME`.

With --diffusers --out FOLDER the model becomes a pipeline for `diffusers.DDPMPipeline.from_pretrained(FOLDER)`; NAME
may then also be a training folder, NAME/t0003 or a file of weights.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunediff import analysis, cli, models, search_space
from tunediff import config as cfg
from tunediff.analysis import Results, evidence
from tunediff.analysis.evidence import choose
from tunediff.config.code import shown
from tunediff.core import text
from tunediff.core.environment import hardware
from tunediff.core.trial_record import TrialRecord
from tunediff.report import words
from tunediff.report.verdicts import sentences
from tunediff.workloads.diffusion import diffusers_export


@cli.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Export a trial; see `--help`."""
    parser = cli.parser("export", __doc__ or "")
    parser.add_argument("name", help="name of the search")
    cli.add_storage(parser)
    parser.add_argument("--trial", help="export this trial (default: the best)")
    parser.add_argument("--diffusers", action="store_true", help="export a pipeline of diffusers")
    places = "YAML file (default: best.yaml in the folder of the search); a new folder with --diffusers (default: "
    parser.add_argument("--out", type=Path, help=f"{places}diffusers in the folder of the model)")
    cli.add_printing(parser, quiet=False)
    args = parser.parse_args(argv)
    if args.diffusers:
        _export_pipeline(args)
    else:
        _export_configuration(args)
    return cli.OK


def _export_configuration(args: argparse.Namespace) -> None:
    found = analysis.read(search_space.folder_of(args.name, args.storage))
    trial = choose(found, args.trial)
    out = args.out or Path(shown(found.folder / f"{args.trial or 'best'}.yaml"))
    ends = "a file name that ends in .yaml, or with --diffusers a folder"
    cli.allow(out.suffix in (".yaml", ".yml"), "--out", out, ends)
    config = cfg.from_dict(cfg.nest(trial.config), f"{found.folder.name}/{trial.name}")
    weights, beside = found.folder / "trials" / trial.name / models.WEIGHTS, out.with_suffix(".safetensors")
    place = str(out.absolute() if args.json else out)  # who reads JSON may stand elsewhere
    written = {"trial": trial.name, "configuration": place}
    with cli.writing("--out", out):
        out.parent.mkdir(parents=True, exist_ok=True)
        if weights.exists():
            shutil.copyfile(weights, beside)
            written["weights"] = str(Path(place).with_suffix(".safetensors"))
        config = cfg.with_relative_paths(cfg.take_along(config, out.parent))
        out.write_text(cfg.dump(config, provenance(found, trial, out), out.parent), encoding="utf-8")
    _tell(written | {"train": _train(trial, Path(place), found.folder.parent)}, args.json)


def _export_pipeline(args: argparse.Namespace) -> None:
    model = models.find_of("diffusion", "--diffusers", args.name, args.storage, args.trial)
    folder = args.out or model.folder / "diffusers"
    diffusers_export.check(folder, model.config)  # before the weights are read
    with cli.writing("--out", folder):
        diffusers_export.write_pipeline(folder, model.config, model.network("cpu").state_dict())
    steps = model.config.process.steps
    sample = f"diffusers.DDPMPipeline.from_pretrained({str(folder)!r})(num_inference_steps={steps})"
    _tell({"model": model.name, "pipeline": folder, "sample": sample}, args.json)


def _tell(written: dict[str, Any], as_json: bool) -> None:
    """Print what was written; as JSON with all keys, null where they do not apply."""
    keys = ("trial", "configuration", "weights", "train", "model", "pipeline", "sample")
    cli.result(written, as_json, {key: written.get(key) for key in keys})


def provenance(found: Results, trial: TrialRecord, out: Path) -> list[str]:
    """Where the configuration comes from and how to use it; the comment lines above it."""
    value, base, environment = trial.value(found.metric), found.baseline_of(trial), trial.environment
    lines = [
        f"trial {trial.name} of search {found.folder.name}, exported {time.strftime('%Y-%m-%d')}",
        f"differs from the baseline in: {text.knobs(found.changed(trial))}",
    ]
    if value is not None:
        of_base = base.value(found.metric) if base is not None else None
        beside = f"; baseline {text.number(of_base)}" if of_base is not None else ""
        spent = f"{trial.points[-1][trial.along]:.1f} {found.clock.seconds}"
        lines.append(f"{found.label} {text.number(value)} after {spent}{beside}")
    known = evidence.read(found)
    if known.told is not None and (known.is_baseline(trial) or known.told.of(trial) is known.told.leader):
        lines += sentences(known.told)
    elif not known.is_baseline(trial) and not known.better(trial):
        lines.append(f"speed-up {words.speedup(known.speedup(trial))}")
    versions = " ".join(f"{name} {version}" for name, version in environment.get("versions", {}).items())
    where = hardware(environment) or environment.get("cpu", "?")
    lines.append(f"measured on {where}, {environment.get('cpu_cores', '?')} CPU cores; {versions}")
    return [*lines, f"train with it: {_train(trial, out, found.folder.parent)}"]


def _train(trial: TrialRecord, out: Path, storage: Path) -> str:
    return text.command("train", "--config", out, "--budget", text.format_exact(trial.budget_s or 60), storage=storage)


if __name__ == "__main__":
    sys.exit(main())
