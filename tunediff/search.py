"""Search for the configuration with the best result for its training seconds: `python -m tunediff.search`."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from tunediff import cli, record, results, space
from tunediff.config import ConfigError, Lines
from tunediff.record import TrialRecord
from tunediff.report import outputs, study_table, verdicts
from tunediff.report.console import Console, Table, skipped
from tunediff.report.sections import hold as section
from tunediff.report.words import plain_table, some
from tunediff.results import Results, comparison, confirmation, evaluating, hold
from tunediff.results.comparison import Comparison
from tunediff.results.confirmation import Confirmation
from tunediff.space import SearchSpace
from tunediff.tuning import confirming, experiment, resources

if TYPE_CHECKING:
    from tunediff.tuning.slot import Slots


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = cli.parser("search", __doc__ or "")
    add = parser.add_argument
    files = "search file (default: digits), or a workload's file, which is searched around its baseline"
    add("words", nargs="*", metavar="SPACE.yaml | mine.py | knob=value", help=files)
    add("--name", help="name of the search and its folder (default: search file and time)")
    cli.add_storage(parser)
    add("--trials", type=int, help="trials in all, the baseline included")
    add("--budget", help="training seconds per trial, e.g. 90s, 10m")
    add("--total", help="wall-clock of the whole search, e.g. 8h")
    add("--seed", type=int, help="seed of the search")
    add("--address", help="a running Ray cluster (default: one on this machine for this search)")
    add("--resume", metavar="NAME", help="go on with a search that was interrupted")
    add("--warm-start", metavar="NAME", help="an earlier search whose trials this one knows already")
    add("--no-check", action="store_true", help="do not try a workload of your own with two steps and one evaluation")
    add("--dry-run", action="store_true", help="print what would run, what it costs and if it fits")
    add("--json", action="store_true", help="print the result as JSON, nothing else on stdout")
    add("-q", "--quiet", action="store_true", help="print the result only")
    return parser.parse_intermixed_args(argv)  # knob=value may stand before and after options


@cli.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Run a search; see `--help`."""
    args = arguments(argv)
    args.address = args.address or os.environ.get("RAY_ADDRESS")
    folder, wanted, content = _resumed(args) if args.resume is not None else _new(args)
    # ---- data and weights that a trial would miss are missed now
    if (check_files := wanted.workload.offers("check_files")) is not None:
        check_files(wanted.baseline.knobs, wanted.evaluates)
    if args.address is None:
        resources.share(wanted, resources.local())
    if args.dry_run:
        print("\n".join(_plan(wanted, folder)))
        return cli.OK
    if content is not None:
        wanted = _created(folder, wanted, content, args)
    try:
        confirmed = _run(folder, wanted, args)
    except (KeyboardInterrupt, experiment.StoppedError) as error:
        resume = f"python -m tunediff.search --resume {folder.name}"
        resume += f" --storage {args.storage}" if args.storage != cli.STORAGE else ""
        stopped = isinstance(error, experiment.StoppedError)
        why = f"error: {error}" if stopped else "\ninterrupted"
        print(f"{why}; everything measured is in {folder}\nresume: {resume}", file=sys.stderr)
        return cli.FAILED if stopped else cli.INTERRUPTED
    found = results.read(folder)
    outputs.write_all(found)
    _conclude(found, confirmed, args.json)
    return cli.OK if found.best is not None else cli.NO_SUCCESS


def _resumed(args: argparse.Namespace) -> tuple[Path, SearchSpace, None]:
    """Folder and space of an earlier search."""
    if args.words or args.name or args.budget or args.seed is not None or args.warm_start:
        raise ConfigError(
            "--resume: takes file, knobs and budget from the folder; only --trials and --total can change"
        )
    folder = args.storage.resolve() / args.resume
    wanted = experiment.reopen(folder, _limits(args))
    if warning := experiment.foreign(folder):
        print(f"warning: {warning}", file=sys.stderr)
    return folder, wanted, None


def _new(args: argparse.Namespace) -> tuple[Path, SearchSpace, Lines]:
    """Folder, space and search file of a new search."""
    files = [word for word in args.words if "=" not in word]
    if len(files) > 1:
        raise ConfigError(f"command line: one search file at most, found {', '.join(files)}")
    path, words = space.find(files[0] if files else None), [word for word in args.words if "=" in word]
    storage = args.storage.resolve()  # Ray needs an absolute path, and its processes may run elsewhere
    # What a cluster elsewhere has is not known before it is asked.
    machine = resources.local()
    content = space.read(path, resources.world_sizes_of(machine) if args.address is None else ())
    read = content
    content = space.completed(read, path, words, machine.cores, machine.gpus > 0)
    args.completed = content is not read
    if args.warm_start is not None:
        content["warm_start"] = str(space.of_search(storage / args.warm_start).parent)
    wanted = space.parse(content, str(path), path.parent, words, _limits(args))
    if args.seed is not None:
        cli.allow(args.seed >= 0, "--seed", args.seed, "a whole number of at least 0")
        wanted = dataclasses.replace(wanted, seed=args.seed)
    if (name := args.name) is not None:
        cli.allow(bool(name) and not set(name) & set("/\\") and name[0] != ".", "--name", name, "a plain folder name")
    return storage / (args.name or f"{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"), wanted, content


def _created(folder: Path, wanted: SearchSpace, content: Lines, args: argparse.Namespace) -> SearchSpace:
    """The space of a new search in its folder, a workload of the user's own having been tried. Raises `ConfigError`."""
    if args.no_check or wanted.workload.file is None:
        return experiment.create(folder, wanted, content)
    from tunediff.tuning import trying  # imports torch

    def say(text: str) -> None:
        if not (args.quiet or args.json):
            print(text, file=sys.stderr, flush=True)

    return trying.create(folder, wanted, content, args.completed, say)


def _limits(args: argparse.Namespace) -> Lines:
    given = {"per_trial": args.budget, "trials": args.trials, "total": args.total}
    return {key: value for key, value in given.items() if value is not None}


def _run(folder: Path, wanted: SearchSpace, args: argparse.Namespace) -> Confirmation | None:
    """Run what is not finished, confirming runs included; under a live table in a terminal, else a line per event."""
    searched = confirming.complete(folder, wanted)
    if searched and not confirming.pending(folder, wanted):
        return _confirmed(folder, wanted)
    quiet = args.quiet or args.json
    kind = Console if quiet or not sys.stdout.isatty() else Table
    share = functools.partial(resources.share, wanted)
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        stack.enter_context(experiment.alone(folder))
        session = stack.enter_context(contextlib.ExitStack())
        if not searched:
            session.enter_context(experiment.noted(folder))
        console = session.enter_context(kind(folder, wanted, quiet))
        slots = stack.enter_context(
            experiment.workers(folder, share, args.address, experiment.warm(wanted), console.greet)
        )
        if not searched:
            experiment.search(folder, wanted, slots, console.listen)
        session.close()
        if not confirming.pending(folder, wanted):
            return _confirmed(folder, wanted)
        _run_again(folder, slots, functools.partial(kind, quiet=quiet, started=begun))
    return _confirmed(folder, wanted)


def _run_again(folder: Path, slots: Slots, console: Callable[..., Console]) -> None:
    """The finalists and the baseline on new seeds, until it is decided; then with the longer budgets."""
    prepared = confirming.prepare(found := results.read(folder))
    assert prepared is not None
    of, again = prepared
    for place, wanted in [prepared, *confirming.longer(found, of)]:
        if confirming.over(found, place):
            continue
        many = some(len(wanted.candidates) // wanted.seeds - 1, "finalist")
        with console(place, wanted) as listening:
            seeds = f"up to {wanted.seeds} new seeds each, fewer if it is decided before"
            if wanted is not again:
                seeds = f"{cli.seconds(wanted.budget.per_trial_s)} of training, {wanted.seeds} seeds each"
                for held in hold.read(found, results.read(of), results.read):
                    for sentence in section.sentences(held) if held.long_s == wanted.budget.per_trial_s else ():
                        listening.say(sentence)
            listening.say(f"confirming: {many} and the baseline, {seeds}")
            tell = functools.partial(_tell, listening)
            confirming.run(found, place, wanted, slots, listening.listen, tell)


def _tell(console: Console, told: Confirmation) -> None:
    """How far the confirming runs are."""
    console.say(f"after {some(told.look.rounds, 'seed')}: {'; '.join(verdicts.so_far(told)) or 'nothing to compare'}")


def _confirmed(folder: Path, wanted: SearchSpace) -> Confirmation | None:
    """What the confirming runs say; None where there are none."""
    found = results.read(folder)
    if wanted.confirm is None or (prepared := confirming.prepare(found)) is None:
        return None
    runs = results.read(prepared[0])
    outputs.write_all(runs)
    return confirmation.confirm(found, runs)


def _conclude(found: Results, confirmed: Confirmation | None, as_json: bool) -> None:
    """Print the result."""
    compared = comparison.compare(found) if found.space.seeds > 1 else None
    studied = study_table.table(found) if found.space.study is not None else None
    front = found.pareto_table() if found.space.cost is not None else None
    block = summary(found, experiment.spent_s(found.folder), compared)
    if confirmed is not None:
        block |= verdicts.block(confirmed) | {"confirmation": str(outputs.confirmation(confirmed)["confirm.md"])}
    if as_json:
        if compared is not None:
            block |= {"configurations": _records(compared.table()), "conclusions": verdicts.conclusions(compared)}
        if studied is not None:
            block["study_rows"] = _records(studied.frame())
        if confirmed is not None and (longer := hold.read(found, confirmed.compared.found, results.read)):
            block["longer_budgets"] = [_records(held.table()) for held in longer]
        if front is not None:
            block["pareto_rows"] = _records(front)
        print(json.dumps(block, indent=2))
        return
    said = ["", cli.block(block)]
    if compared is not None:
        table = plain_table(verdicts.comparison_table(compared, compact=True))
        said += ["", table, "", *verdicts.conclusions(compared)]
    if front is not None:
        words = front.to_string(index=False, float_format=cli.number)
        said.append(f"\nPareto front, from the best value to the lowest cost:\n{words}")
    if confirmed is not None:
        said += ["", plain_table(verdicts.confirmation_table(confirmed)), "", *verdicts.sentences(confirmed)]
        for held in hold.read(found, confirmed.compared.found, results.read):
            said += ["", plain_table(section.hold_table(held)), "", *section.sentences(held)]
    if studied is not None:
        said += ["", *filter(None, [studied.study.title]), studied.text()]
    print("\n".join(said))


def _plan(wanted: SearchSpace, folder: Path) -> list[str]:
    """What a search would run and cost."""
    machine = resources.local()
    share = resources.share(wanted, machine)
    trials, per_trial = wanted.budget.trials, wanted.budget.per_trial_s
    train_h = trials * per_trial / 3600
    parameters = _parameters(wanted)
    kept, working = 4 * parameters * trials / 2**20, 20 * parameters * share.slots / 2**20
    above = next(path for path in [folder, *folder.parents] if path.exists())
    free = shutil.disk_usage(above).free / 2**20
    repeats = f", {wanted.seeds} seeds each" if wanted.seeds > 1 else ""
    repeats += f", {wanted.noise} of them the baseline, for the noise" if wanted.noise > 1 else ""
    points = "unlimited" if (n := space.size(wanted)) == float("inf") else f"{n:.0f}"
    again = " and ".join(f"{runs} × {cli.seconds(each_s)}" for runs, each_s in wanted.again)
    lines = [
        f"search: {wanted.source} ({len(wanted.dimensions)} knobs, {points} points)",
        f"trials: {trials} × {cli.seconds(per_trial)} training, {share.slots} at once{repeats}",
        f"training_hours: {train_h:.2f} (evaluation, start-up and compilation come on top)",
        *([f"confirming: at most {again} training; it ends when it is decided"] if again else []),
        *(_evaluation(wanted) if wanted.evaluates else []),
        f"gpu_hours: {train_h * max(resources.world_sizes(wanted)) if share.gpu else 0:.2f}",
        f"total_limit: {cli.seconds(wanted.budget.total_s) if wanted.budget.total_s else 'none'}",
        f"machine: {machine}; world sizes {', '.join(map(str, resources.world_sizes(wanted)))} fit",
        f"parameters: {f'{parameters:,}' if parameters else 'unknown (the workload has no network(knobs))'}",
        f"disk_mib: {kept + working:.0f} of {free:.0f} free ({'fits' if kept + working < free else 'DOES NOT FIT'})",
    ]
    lines += [f"  {dimension.name}: {dimension}" for dimension in wanted.dimensions]
    lines += [f"  first {i}: {cli.knobs(wanted.changed(point))}" for i, point in enumerate(wanted.candidates)]
    return lines + skipped(wanted)


def _evaluation(wanted: SearchSpace) -> list[str]:
    """What judging takes, by the rate of the baseline's network on this machine."""
    from tunediff.distributed import alone
    from tunediff.training import judging

    pass_s = judging.pass_s(wanted.baseline, alone())
    cost = evaluating.cost(wanted, pass_s)
    if cost.evaluation_s is None:
        why = "the workload has no evaluation_work(knobs) and evaluation_pass(knobs, device), or its data are not here"
        return [f"evaluation_hours: unknown ({why})"] + ["final_evaluation: unknown"] * bool(cost.finals)
    hours = cost.evaluations * cost.evaluation_s / 3600
    measured = f"{cost.evaluations} × {cli.seconds(cost.evaluation_s)}: the baseline's network, timed on this machine"
    said = [f"evaluation_hours: {hours:.2f} ({measured})"]
    for of, runs, each_s in cost.finals:
        assert each_s is not None
        said.append(f"final_evaluation: {cli.seconds(each_s)} per {of}, {runs * each_s / 3600:.2f} hours in all")
    return said


def _parameters(wanted: SearchSpace) -> int:
    """Of the baseline's model; 0 where its workload does not say how to build it."""
    import torch

    if (network := wanted.workload.offers("network")) is None:
        return 0
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in network(wanted.baseline.knobs).parameters())


def summary(found: Results, wall_s: float, compared: Comparison | None = None) -> dict[str, Any]:
    """The result of a search, for people (`key: value`) and for `--json`; `compared`: of one with several seeds."""
    parts, best, folder, study = found.seconds(), found.best, found.folder, found.space.study
    statuses = collections.Counter(trial.status or "unfinished" for trial in found.trials)
    block: dict[str, Any] = {
        "search": folder.name,
        "trials": len(found.trials),
        **{status: statuses[status] for status in (*record.STATUSES, "unfinished") if status in statuses},
    }
    if best is not None:
        block |= _best(found, best) if compared is None else _best_of_seeds(compared, best)
        if "seconds_to_baseline" in block:
            block["speedup_means"] = (
                "baseline's training seconds / those of the best until equal (linear between points)"
            )
        block |= verdicts.noise_block(found, verdicts.noise_of(found)) if compared is None else {}
    training = parts["train"] + parts["data_wait"]
    block |= {
        "wall_s": wall_s,
        "training_s": training,
        **{f"{part}_s": parts[part] for part in ("data_wait", "compile", "evaluation", "checkpoint", "setup")},
        "overhead_s": max(0.0, wall_s - sum(parts.values())),
        "training_share": training / wall_s if wall_s else 0.0,
        "results": str(folder),
    }
    files = (
        ("table", "trials.csv", True),
        ("curves", "curves.png", True),
        ("comparison", "comparison.png", compared is not None),
        ("pareto", "pareto.csv", found.space.cost is not None),
        ("study_table", "study.md", study is not None),
        ("study_figure", "study.png", study is not None and study.has_figure),
    )
    block |= {what: str(folder / name) for what, name, there in files if there}
    block["study"] = f"sqlite:///{folder / 'study.db'}"
    if best is not None:
        if (shown := folder / "trials" / best.name / "samples.png").exists():
            block["samples"] = str(shown)
        block["export"] = f"python -m tunediff.export {folder.name}"
    return block | {"report": f"python -m tunediff.report {folder.name}"}


def _best(found: Results, best: TrialRecord) -> dict[str, Any]:
    """The best trial of a search with one seed, beside the baseline."""
    base, label = found.baseline, found.label
    of_base = base.value(found.metric) if base is not None else None
    block: dict[str, Any] = {"best_trial": best.name, "best_configuration": cli.knobs(found.changed(best))}
    block |= {f"best_{label}": best.value(found.metric), f"baseline_{label}": of_base}
    if why := found.no_baseline(best):
        block["speedup"] = f"not determined: {why}"
    else:
        block["speedup"] = found.speedup(best)
        block |= {} if found.by_rate else {"seconds_to_baseline": found.seconds_to_baseline(best)}
    return block


def _best_of_seeds(compared: Comparison, best: TrialRecord) -> dict[str, Any]:
    """The configuration with the best mean over the seeds, beside the baseline; `best` is its best run."""
    rows, mean, label = _records(compared.table()), f"{compared.metric}_mean", compared.found.label
    row = rows[compared.groups.index(compared.of(best))]
    base = rows[0] if compared.baseline is not None else {}
    block = {"best_trial": best.name, "best_configuration": row["configuration"], "best_verdict": row["verdict"]}
    block |= {f"best_{label}": row[mean], f"baseline_{label}": base.get(mean)}
    block["means_over"] = f"{row['finished']} seeds"
    if compared.baseline is None or not compared.baseline.done:
        return block | {"speedup": "not determined: no run of the baseline ended ok"}
    block["speedup"] = row["speedup"]
    return block if compared.found.by_rate else block | {"seconds_to_baseline": row["seconds_to_baseline"]}


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows in JSON types; what is missing is null."""
    rows: list[dict[str, Any]] = json.loads(table.to_json(orient="records"))
    return rows


if __name__ == "__main__":
    sys.exit(main())
