"""Search for the configuration with the best FID for its training seconds: `python -m tunediff.search`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunediff import cli, record, results, space
from tunediff import config as cfg
from tunediff.config import ConfigError
from tunediff.record import TrialRecord
from tunediff.report import outputs, study_table, verdicts
from tunediff.report.console import Console, Table, skipped
from tunediff.report.words import plain_table
from tunediff.results import changed, comparison, confirmation
from tunediff.results.comparison import Comparison
from tunediff.results.confirmation import Confirmation
from tunediff.space import SearchSpace
from tunediff.tuning import confirming, experiment, resources


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = cli.parser("search", __doc__ or "")
    parser.add_argument("words", nargs="*", metavar="SPACE.yaml | knob=value", help="search file (default: digits)")
    parser.add_argument("--name", help="name of the search and its folder (default: search file and time)")
    parser.add_argument(
        "--storage", type=Path, default=cli.STORAGE, help="folder of all searches (default: %(default)s)"
    )
    parser.add_argument("--trials", type=int, help="trials in all, the baseline included")
    parser.add_argument("--budget", help="training seconds per trial, e.g. 90s, 10m")
    parser.add_argument("--total", help="wall-clock of the whole search, e.g. 8h")
    parser.add_argument("--seed", type=int, help="seed of the search")
    parser.add_argument("--address", help="a running Ray cluster (default: one on this machine for this search)")
    parser.add_argument("--resume", metavar="NAME", help="go on with a search that was interrupted")
    parser.add_argument("--warm-start", metavar="NAME", help="an earlier search whose trials this one knows already")
    parser.add_argument("--dry-run", action="store_true", help="print what would run, what it costs and if it fits")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, nothing else on stdout")
    parser.add_argument("-q", "--quiet", action="store_true", help="print the result only")
    return parser.parse_intermixed_args(argv)  # knob=value may stand before and after options


def main(argv: Sequence[str] | None = None) -> int:
    """Run a search; see `--help`."""
    return cli.guarded(_main, argv)


def _main(argv: Sequence[str] | None) -> int:
    args = arguments(argv)
    args.address = args.address or os.environ.get("RAY_ADDRESS")
    storage = args.storage.resolve()  # Ray needs an absolute path, and its processes may run elsewhere
    if args.resume is not None:
        if args.words or args.name or args.budget or args.seed is not None or args.warm_start:
            raise ConfigError(
                "--resume: takes file, knobs and budget from the folder; only --trials and --total can change"
            )
        folder = storage / args.resume
        wanted = experiment.reopen(folder, _limits(args))
    else:
        path, overrides = _words(args.words)
        # What a cluster elsewhere has is not known before it is asked.
        content = space.read(path, resources.world_sizes_of(resources.local()) if args.address is None else ())
        if args.warm_start is not None:
            content["warm_start"] = str(space.of_search(storage / args.warm_start).parent)
        wanted = space.parse(content, str(path), path.parent, overrides, _limits(args))
        if args.seed is not None:
            wanted = _seeded(wanted, args.seed)
        folder = storage / (args.name or f"{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}")
        if args.name is not None and (not args.name or set(args.name) & set("/\\") or args.name.startswith(".")):
            raise ConfigError(f"--name: {args.name!r} is not allowed; allowed: a plain folder name")
    _check_inputs(wanted)
    if args.address is None:
        resources.share(wanted, resources.local())
    if args.dry_run:
        print("\n".join(_plan(wanted, folder)))
        return cli.OK
    if args.resume is None:
        experiment.create(folder, wanted, content)

    try:
        if not _complete(folder, wanted):
            with _console(folder, wanted, args) as console:
                experiment.run(folder, wanted, console.listen, args.address, console.greet)
        confirmed = _confirm(folder, args) if wanted.confirm is not None else None
    except (KeyboardInterrupt, experiment.StoppedError) as error:
        resume = f"python -m tunediff.search --resume {folder.name}"
        resume += f" --storage {args.storage}" if args.storage != cli.STORAGE else ""
        stopped = isinstance(error, experiment.StoppedError)
        why = f"error: {error}" if stopped else "\ninterrupted"
        print(f"{why}; everything measured is in {folder}\nresume: {resume}", file=sys.stderr)
        return cli.FAILED if stopped else cli.INTERRUPTED
    found = results.read(folder)
    outputs.write_all(found)
    compared = comparison.compare(found) if found.space.seeds > 1 else None
    studied = study_table.table(found) if found.space.study is not None else None
    block = summary(found, experiment.spent_s(folder), compared)
    if confirmed is not None:
        block |= verdicts.block(confirmed) | {"confirmation": str(outputs.confirmation(confirmed)["confirm.md"])}
    if args.json:
        rows = {"study_rows": json.loads(studied.frame().to_json(orient="records"))} if studied is not None else {}
        if found.space.cost is not None:
            rows["pareto_rows"] = json.loads(found.pareto_table().to_json(orient="records"))
        print(json.dumps(block | _records(compared) | rows, indent=2))
    else:
        print("\n" + "\n".join(f"{key}: {_word(value)}" for key, value in block.items()))
        if compared is not None:
            table = plain_table(verdicts.comparison_table(compared, compact=True))
            print("\n".join(["", table, "", *verdicts.conclusions(compared)]))
        if found.space.cost is not None:
            front = found.pareto_table().to_string(index=False, float_format=cli.number)
            print(f"\nPareto front, from the best value to the lowest cost:\n{front}")
        if confirmed is not None:
            table = plain_table(verdicts.confirmation_table(confirmed))
            print("\n".join(["", table, "", *verdicts.sentences(confirmed)]))
        if studied is not None:
            print("\n".join(["", *filter(None, [studied.study.title]), studied.text()]))
    return cli.OK if found.best is not None else cli.NO_SUCCESS


def _confirm(folder: Path, args: argparse.Namespace) -> Confirmation | None:
    """Run the finalists and the baseline again, on new seeds; None when the search has no finalist."""
    found = results.read(folder)
    if (prepared := confirming.prepare(found)) is None:
        return None
    of, wanted = prepared
    if not _complete(of, wanted):
        with _console(of, wanted, args) as console:
            console.say(f"confirming: {len(wanted.points) // wanted.seeds - 1} finalists and the baseline, new seeds")
            experiment.run(of, wanted, console.listen, args.address)
    runs = results.read(of)
    outputs.write_all(runs)
    return confirmation.confirm(found, runs)


def _console(folder: Path, wanted: SearchSpace, args: argparse.Namespace) -> Console:
    """A live table in a terminal, a line per event elsewhere."""
    quiet = args.quiet or args.json
    return Console(folder, wanted, quiet) if quiet or not sys.stdout.isatty() else Table(folder, wanted)


def _complete(folder: Path, wanted: SearchSpace) -> bool:
    """Whether a resumed search has nothing left to do."""
    trials = record.read_trials(folder)
    return len(trials) >= wanted.budget.trials and all(trial.finished for trial in trials)


def _words(words: list[str]) -> tuple[Path, dict[str, Any]]:
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise ConfigError(f"command line: one search file at most, found {', '.join(files)}")
    return space.find(files[0] if files else None), cfg.parse_overrides([word for word in words if "=" in word])


def _limits(args: argparse.Namespace) -> dict[str, Any]:
    given = {"per_trial": args.budget, "trials": args.trials, "total": args.total}
    return {key: value for key, value in given.items() if value is not None}


def _seeded(wanted: SearchSpace, seed: int) -> SearchSpace:
    import dataclasses

    if seed < 0:
        raise ConfigError(f"--seed: {seed} is not allowed; allowed: a whole number of at least 0")
    return dataclasses.replace(wanted, seed=seed)


def _check_inputs(wanted: SearchSpace) -> None:
    """Data and weights that a trial would miss are missed now."""
    from tunediff.data import sources
    from tunediff.evaluation import weights

    sources.check(wanted.baseline.data)
    if wanted.metric != results.RATE:
        weights.check(wanted.baseline)


def _plan(wanted: SearchSpace, folder: Path) -> list[str]:
    """What a search would run and cost."""
    import shutil

    import torch

    from tunediff.workloads.diffusion.unet import UNet

    machine = resources.local()
    share = resources.share(wanted, machine)
    trials, per_trial = wanted.budget.trials, wanted.budget.per_trial_s
    train_h = trials * per_trial / 3600
    with torch.device("meta"):
        network = UNet(wanted.baseline.model, wanted.baseline.data.channels, wanted.baseline.data.image_size)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    kept, working = 4 * parameters * trials / 2**20, 20 * parameters * share.slots / 2**20
    above = next(path for path in [folder, *folder.parents] if path.exists())
    free = shutil.disk_usage(above).free / 2**20
    repeats = f", {wanted.seeds} seeds each" if wanted.seeds > 1 else ""
    points = "unlimited" if (n := space.size(wanted)) == float("inf") else f"{n:.0f}"
    lines = [
        f"search: {wanted.source} ({len(wanted.dimensions)} knobs, {points} points)",
        f"trials: {trials} × {cli.seconds(per_trial)} training, {share.slots} at once{repeats}",
        f"training_hours: {train_h:.2f} (evaluation, start-up and compilation come on top)",
        f"gpu_hours: {train_h * max(resources.world_sizes(wanted)) if share.gpu else 0:.2f}",
        f"total_limit: {cli.seconds(wanted.budget.total_s) if wanted.budget.total_s else 'none'}",
        f"machine: {machine}; world sizes {', '.join(map(str, resources.world_sizes(wanted)))} fit",
        f"parameters: {parameters:,}",
        f"disk_mib: {kept + working:.0f} of {free:.0f} free ({'fits' if kept + working < free else 'DOES NOT FIT'})",
    ]
    lines += [f"  {dimension.name}: {dimension}" for dimension in wanted.dimensions]
    lines += [f"  first {i}: {cli.knobs(changed(point, wanted))}" for i, point in enumerate(wanted.points)]
    return lines + skipped(wanted)


def _word(value: Any) -> str:
    return cli.number(value) if value is not None else "none"


def summary(found: results.Results, wall_s: float, compared: Comparison | None = None) -> dict[str, Any]:
    """The result of a search, for people (`key: value`) and for `--json`; `compared`: of one with several seeds."""
    parts, best = found.seconds(), found.best
    statuses = [trial.status or "unfinished" for trial in found.trials]
    block: dict[str, Any] = {
        "search": found.folder.name,
        "trials": len(found.trials),
        **{status: statuses.count(status) for status in (*record.STATUSES, "unfinished") if status in statuses},
    }
    if best is not None:
        block |= _best(found, best) if compared is None else _best_of_seeds(compared, best)
        if "seconds_to_baseline" in block:
            block["speedup_means"] = (
                "baseline's training seconds / those of the best until equal (linear between points)"
            )
    training = parts["train"] + parts["data_wait"]
    counted = sum(parts.values())
    block |= {
        "wall_s": wall_s,
        "training_s": training,
        "data_wait_s": parts["data_wait"],
        "compile_s": parts["compile"],
        "evaluation_s": parts["evaluation"],
        "checkpoint_s": parts["checkpoint"],
        "setup_s": parts["setup"],
        "overhead_s": max(0.0, wall_s - counted),
        "training_share": training / wall_s if wall_s else 0.0,
        "results": str(found.folder),
        "table": str(found.folder / "trials.csv"),
        "curves": str(found.folder / "curves.png"),
        **({"comparison": str(found.folder / "comparison.png")} if compared is not None else {}),
        **({"pareto": str(found.folder / "pareto.csv")} if found.space.cost is not None else {}),
        **_study_files(found),
        "study": f"sqlite:///{found.folder / 'study.db'}",
    }
    if best is not None:
        if not found.by_rate:
            block["samples"] = str(found.folder / "trials" / best.name / "samples.png")
        block["export"] = f"python -m tunediff.export {found.folder.name}"
    block["report"] = f"python -m tunediff.report {found.folder.name}"
    return block


def _study_files(found: results.Results) -> dict[str, str]:
    if found.space.study is None:
        return {}
    figure = {"study_figure": str(found.folder / "study.png")} if found.space.study.has_figure else {}
    return {"study_table": str(found.folder / "study.md"), **figure}


def _best(found: results.Results, best: TrialRecord) -> dict[str, Any]:
    """The best trial of a search with one seed, beside the baseline."""
    base = found.baseline
    block: dict[str, Any] = {
        "best_trial": best.name,
        "best_configuration": cli.knobs(found.changed(best)),
        f"best_{found.label}": best.value(found.metric),
        f"baseline_{found.label}": base.value(found.metric) if base is not None else None,
        "speedup": found.speedup(best),
    }
    if not found.by_rate and base is not None and base.points:
        block["seconds_to_baseline"] = found.seconds_to_baseline(best)
    return block


def _best_of_seeds(compared: Comparison, best: TrialRecord) -> dict[str, Any]:
    """The configuration with the best mean over the seeds, beside the baseline; `best` is its best run."""
    rows = _records(compared)["configurations"]
    row = rows[compared.groups.index(compared.of(best))]
    base = rows[0] if compared.baseline is not None else {}
    block: dict[str, Any] = {
        "best_trial": best.name,
        "best_configuration": row["configuration"],
        "best_verdict": row["verdict"],
        f"best_{compared.found.label}": row[f"{compared.metric}_mean"],
        f"baseline_{compared.found.label}": base.get(f"{compared.metric}_mean"),
        "means_over": f"{row['finished']} seeds",
        "speedup": row["speedup"],
    }
    if not compared.found.by_rate:
        block["seconds_to_baseline"] = row["seconds_to_baseline"]
    return block


def _records(compared: Comparison | None) -> dict[str, Any]:
    """The comparison as JSON has it."""
    if compared is None:
        return {}
    rows = json.loads(compared.table().to_json(orient="records"))
    return {"configurations": rows, "conclusions": verdicts.conclusions(compared)}


if __name__ == "__main__":
    sys.exit(main())
