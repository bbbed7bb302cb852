"""Export the best configuration of a search, with its weights: `tunediff export NAME`.

With --diffusers --out FOLDER the model becomes a pipeline, for
`diffusers.DiffusionPipeline.from_pretrained(FOLDER)`; NAME may then also be a training folder,
NAME/t0003 or an exported best.yaml.
"""

from __future__ import annotations

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
from tunediff.analysis.speed import repeating_budget
from tunediff.command import trial as commands
from tunediff.core import remote, text
from tunediff.core.environment import hardware
from tunediff.core.options import REQUIRED, JsonOptions, allow, option, writing
from tunediff.core.trial_record import TrialRecord
from tunediff.report import reading, sentences


class ExportOptions(JsonOptions, remote.StorageOptions):
    """The options of the command."""

    name: str = option(REQUIRED, "name of the search", flag="name")
    trial: str | None = option(None, "export this trial (default: the best)")
    diffusers: bool = option(False, "export a pipeline of diffusers")
    out: Path | None = option(
        None,
        "YAML file (default: best.yaml in the folder of the search); a new folder with --diffusers"
        " (default: diffusers in the folder of the model)",
    )


@cli.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Export a trial; see `--help`."""
    options = cli.parse("export", __doc__, ExportOptions, argv)
    if options.diffusers:
        _export_pipeline(options)
    else:
        _export_configuration(options)
    return cli.OK


def _export_configuration(options: ExportOptions) -> None:
    """Write the configuration of a trial, and its weights beside it."""
    search = analysis.read(search_space.folder_of(options.name, Path(options.storage)))
    out = options.out or Path(text.shown(search.folder / f"{options.trial or 'best'}.yaml"))
    # A program that reads the JSON may run in another folder.
    _print_written(
        write(search, options.trial, out.absolute() if options.as_json else out), options.as_json
    )


def write(search: Results, name: str | None, out: Path) -> dict[str, str]:
    """Write a trial's configuration and weights; return the files and how to train.

    `name`: of the trial; None: the best. Raises `ConfigError`.
    """
    trial = choose(search, name)
    ends = "a file name that ends in .yaml, or with --diffusers a folder"
    allow(out.suffix in (".yaml", ".yml"), "--out", out, ends)
    config = cfg.from_dict(cfg.nest(trial.config), f"{search.folder.name}/{trial.name}")
    remote.pull(search.folder / "trials" / trial.name, heavy=True)
    weights = search.folder / "trials" / trial.name / models.WEIGHTS
    beside, written = (
        out.with_suffix(".safetensors"),
        {"trial": trial.name, "configuration": str(out)},
    )
    with writing("--out", out):
        out.parent.mkdir(parents=True, exist_ok=True)
        # Refuses a folder with another workload's files before an earlier export is replaced.
        copied = cfg.with_relative_paths(cfg.take_along(config, out.parent))
        beside.unlink(missing_ok=True)  # of an earlier export, perhaps of another trial
        if weights.exists():
            shutil.copyfile(weights, beside)
            written["weights"] = str(beside)
        comments = provenance(search, trial, out)
        out.write_text(cfg.dump(copied, comments, out.parent), encoding="utf-8")
    remote.push_or_warn(out)
    return written | {"train": _train(search, trial, out)}


def _export_pipeline(options: ExportOptions) -> None:
    name = options.name if options.trial is None else f"{options.name}/{options.trial}"
    model = models.find_with_hook("write_pipeline", "--diffusers", name, Path(options.storage))
    write: Any = cfg.of(model.config).get_hook("write_pipeline")
    folder = options.out or model.folder / "diffusers"
    with writing("--out", folder):
        example = write(folder, model.config, lambda: model.network("cpu").state_dict())
    remote.push_or_warn(folder)
    _print_written({"model": model.name, "pipeline": folder, "sample": example}, options.as_json)


def _print_written(written: dict[str, Any], as_json: bool) -> None:
    """Print what was written; as JSON with all keys, null where they do not apply."""
    keys = ("trial", "configuration", "weights", "train", "model", "pipeline", "sample")
    cli.result(written, as_json, {key: written.get(key) for key in keys})


def provenance(results: Results, trial: TrialRecord, out: Path) -> list[str]:
    """Return the comment lines above the configuration: where it comes from, and how to use it."""
    environment = trial.environment
    lines = [
        f"trial {trial.name} of search {results.folder.name}, exported {time.strftime('%Y-%m-%d')}",
        f"differs from the baseline in: {text.knobs(results.changed(trial))}",
    ]
    lines += _measured(results, trial)
    versions = " ".join(
        f"{name} {version}" for name, version in environment.get("versions", {}).items()
    )
    machine = hardware(environment) or environment.get("cpu", "?")
    lines.append(
        f"measured on {machine}, {environment.get('cpu_cores', '?')} CPU cores; {versions}"
    )
    if files := commands.artifacts(results.folder / "trials" / trial.name):
        lines.append(f"it left: {', '.join(map(text.shown, files))}")
    return [*lines, f"train with it: {_train(results, trial, out)}"]


def _measured(results: Results, trial: TrialRecord) -> list[str]:
    """Return the lines about a trial's value and how it compares with the baseline."""
    value, base, lines = trial.value(results.metric), results.baseline_of(trial), list[str]()
    if value is not None:
        base_value = base.value(results.metric) if base is not None else None
        of_baseline = f"; baseline {text.number(base_value)}" if base_value is not None else ""
        train_time = f"{trial.points[-1][trial.along]:.1f} {results.clock.seconds}"
        note = results.outcome_of(trial).failure_note
        reached = f"{results.label} {text.number(value)} after {train_time}"
        lines.append(f"{', '.join(filter(None, [reached, note]))}{of_baseline}")
    facts = evidence.read(results)
    if facts.confirmation is not None and (
        facts.is_baseline(trial)
        or facts.confirmation.candidate_of(trial) is facts.confirmation.leader
    ):
        lines += reading.of_search(facts).summary
    elif not facts.is_baseline(trial) and not facts.better(trial):
        lines.append(f"speed-up {sentences.OPEN}")
    return lines


def _train(results: Results, trial: TrialRecord, out: Path) -> str:
    if cfg.is_command(str(trial.config["workload"])):
        return commands.command_line(cfg.configuration_of(trial))
    budget = repeating_budget(results, trial)
    return text.command("train", "--config", out, *budget, storage=results.folder.parent)


if __name__ == "__main__":
    sys.exit(main())
