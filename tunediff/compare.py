"""Is B better than A at equal training seconds, here? `python -m tunediff.compare A B`.

A and B: a configuration file such as an exported best.yaml, digits or cifar10, or a workload's file (mine.py,
mine.py:PRESET, mine.py@REVISION of its git repository); knob=value behind one of them goes on top of it. Without B it
is A with what stands behind it: `compare mine.py lr=3e-4`. Both run once on each of several seeds, which decide initial
weights, order of the data and everything drawn, one run at a time, until the difference is larger than the noise, or
no number of pairs that is allowed would tell it. The test allows for every look: B is wrongly called better, or worse,
in at most 2.5 % of comparisons each.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tunediff import cli, record
from tunediff import config as cfg
from tunediff.clock import Budget
from tunediff.config import ConfigError, Systems
from tunediff.files import write_text
from tunediff.results import confirmation, pairs
from tunediff.results.pairs import Pairs
from tunediff.space import duration_s
from tunediff.tuning import experiment, resources

NOT_TOLD, WORSE, FAILED_RUN = 10, 11, 12
EXITS = {"better": cli.OK, "not told apart": NOT_TOLD, "worse": WORSE, "failed": FAILED_RUN}
MOST = 12


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = cli.parser("compare", __doc__ or "")
    parser.epilog = (
        "Exit codes: 0 B is better, 10 not told apart, 11 B is worse, 12 a run of one failed; 1 failed, 2 bad input, "
        "130 interrupted."
    )
    add = parser.add_argument
    add("words", nargs="*", metavar="A [knob=value …] [B [knob=value …]]", help="what is compared")
    add("--budget", help="training seconds of a run, e.g. 90s, 10m (default: 60s)")
    add("--pairs", type=int, help=f"pairs of runs at most (default: {MOST})")
    add("--resolution", help="a difference that does not matter, e.g. 2%% of A's value, or 0.01 of an accuracy")
    add("--compile", choices=("charged", "free"), help="whether compiling counts as training (default: charged)")
    add("--name", help="name of the comparison and its folder (default: compare and the time)")
    cli.add_storage(parser, "all searches and comparisons")
    add("--resume", metavar="NAME", help="go on with a comparison that was interrupted")
    add("--address", help="a running Ray cluster (default: one on this machine for this comparison)")
    add("--no-check", action="store_true", help="do not try workloads of your own with two steps and one evaluation")
    add("--json", action="store_true", help="print the result as JSON, nothing else on stdout")
    add("-q", "--quiet", action="store_true", help="print the result only")
    return parser.parse_intermixed_args(argv)


@cli.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Compare; see `--help`."""
    args = arguments(argv)
    begun = time.monotonic()

    def say(text: str) -> None:
        if not (args.quiet or args.json):
            print(f"[{cli.seconds(time.monotonic() - begun):>6}] {text}", flush=True)

    folder = _resumed(args) if args.resume is not None else _new(args, say)
    try:
        _run(pairs.read(folder), args.address or os.environ.get("RAY_ADDRESS"), say)
    except (KeyboardInterrupt, experiment.StoppedError) as error:
        resume = f"python -m tunediff.compare --resume {folder.name}"
        resume += f" --storage {args.storage}" if args.storage != cli.STORAGE else ""
        why = f"error: {error}" if isinstance(error, experiment.StoppedError) else "\ninterrupted"
        print(f"{why}; everything measured is in {folder}\nresume: {resume}", file=sys.stderr)
        return cli.FAILED if isinstance(error, experiment.StoppedError) else cli.INTERRUPTED
    from tunediff.report import pairs as report  # imports matplotlib

    told = pairs.read(folder)
    written = report.write_all(told)
    block = report.block(told) | {"wall_s": experiment.spent_s(folder), "report": str(written)}
    print(json.dumps(block, indent=2) if args.json else "\n".join([cli.block(block), "", *report.sentences(told)]))
    return EXITS[told.verdict]


# ------------------------------------------------------------------------------------------------------- what is asked
def _resumed(args: argparse.Namespace) -> Path:
    if args.words or args.name or args.budget or args.pairs or args.resolution or args.compile:
        untrue = "a limit that moves with the results would make its error rates untrue"
        raise ConfigError(f"--resume: takes both sides, budget, pairs and resolution from the folder: {untrue}")
    folder: Path = args.storage.resolve() / args.resume
    pairs.read(folder)
    return folder


def _new(args: argparse.Namespace, say: Callable[[str], None]) -> Path:
    """The folder of a new comparison, with both sides and what was asked. Raises `ConfigError`."""
    budget_s = duration_s(args.budget or "60s", "--budget")
    most = MOST if args.pairs is None else args.pairs
    cli.allow(3 <= most <= 100, "--pairs", most, "a whole number from 3 to 100: two say nothing of their own noise")
    name = args.name or f"compare-{time.strftime('%Y%m%d-%H%M%S')}"
    cli.allow(bool(name) and not set(name) & set("/\\") and name[0] not in ".-", "--name", name, "a plain folder name")
    folder: Path = args.storage.resolve() / name
    if folder.exists():
        raise ConfigError(f"--name: {name!r} exists in {folder.parent}; choose another name, or --resume {name}")
    asked = _sides(args.words)
    with tempfile.TemporaryDirectory(prefix="tunediff-compare-") as elsewhere:
        sides = [_side(words, Path(elsewhere) / side) for words, side in zip(asked, pairs.SIDES, strict=True)]
        within = _resolution(args.resolution, sides[0])
        _refuse_pointless(asked, sides, most)
        checked: set[str] = set()
        for config in sides:
            if (check_files := cfg.of(config).offers("check_files")) is not None:
                check_files(config.knobs, evaluates=True)
            resources.divided(resources.local(), *_needs([config]))
            if cfg.of(config).file is not None and not args.no_check and cfg.fingerprint(config) not in checked:
                checked.add(cfg.fingerprint(config))
                _check(config, say)
        content = {
            "a": " ".join(asked[0]), "b": " ".join(asked[1]), "budget_s": budget_s, "pairs": most, "within": within,
            "compile": args.compile or "charged",
        }  # fmt: skip
        with cli.writing("--storage", folder):
            for config, side in zip(sides, pairs.SIDES, strict=True):
                own = cfg.take_along(config, folder / side)
                write_text(folder / side / "config.yaml", cfg.dump(own, folder=folder / side))
            write_text(folder / pairs.FILE, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    return folder


def _sides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """A and B, each with what goes on top of it. Raises `ConfigError`."""
    found: list[list[str]] = []
    for word in words:
        if "=" not in word:
            found.append([word])
        elif not found:
            raise ConfigError(f"command line: {word}: on top of what? knob=value stands behind A or B")
        else:
            found[-1].append(word)
    if len(found) == 1 and len(found[0]) > 1:
        found = [[found[0][0]], found[0]]
    if len(found) != 2:
        given = " ".join(words) or "nothing"
        raise ConfigError(f"command line: {given}: needs A and B, or A and knob=value for what B changes")
    return found[0], found[1]


def _side(words: Sequence[str], elsewhere: Path) -> Systems:
    """The configuration of one side; another revision of its file is laid out in `elsewhere`."""
    name, at, revision = words[0].rpartition("@")
    if at and name.partition(":")[0].endswith(".py"):
        file, colon, preset = name.partition(":")
        name = f"{_at_revision(Path(file), revision, elsewhere)}{colon}{preset}"
    else:
        name = words[0]
    config: Systems = cfg.named(Path(name), words[1:])
    return cfg.override(config, {"seed": config.seed + confirmation.SEED_OFFSET})


def _at_revision(file: Path, revision: str, elsewhere: Path) -> Path:
    """The file as it was, with its whole folder, which it may import from. Raises `ConfigError`."""

    def git(*words: str) -> bytes:
        try:
            done = subprocess.run(["git", *words], cwd=file.absolute().parent, capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", b"").decode(errors="replace").strip() or str(error)
            raise ConfigError(f"{file}@{revision}: {said.splitlines()[-1]}") from None
        return done.stdout

    archive = git("archive", "--format=tar", revision, ".")
    with tarfile.open(fileobj=io.BytesIO(archive)) as content:
        content.extractall(elsewhere, filter="data")
    if not (elsewhere / file.name).is_file():
        raise ConfigError(f"{file}@{revision}: no such file in that revision")
    return elsewhere / file.name


def _resolution(given: str | None, config: Systems) -> float | None:
    """A share of A's value where values are compared by ratios, else in units of the metric. Raises `ConfigError`."""
    if given is None:
        return None
    share, metric = given.endswith("%"), cfg.of(config).objective
    allowed = "a number above 0, or a share of A's value such as 2%"
    if share and metric.mode == "max":
        raise ConfigError(
            f"--resolution: {given!r} is not allowed: {metric.name} is compared by differences, give units"
        )
    try:
        value = float(given.rstrip("%")) / (100 if share else 1)
    except ValueError:
        value = 0.0
    cli.allow(value > 0, "--resolution", given, allowed)
    return value


def _refuse_pointless(asked: Sequence[Sequence[str]], sides: Sequence[Systems], most: int) -> None:
    """One configuration on the same seeds, runs that would count twice, results that cannot be compared."""
    one, two = (cfg.of(config).objective for config in sides)
    if one != two:
        raise ConfigError(
            f"{asked[1][0]}: is judged by {two.name} ({two.mode}), {asked[0][0]} by {one.name} ({one.mode})"
        )
    apart = sides[1].seed - sides[0].seed
    device = resources.local().device
    alike = [cfg.override(cfg.effective(config, device), {"seed": 0}, check=False) for config in sides]
    if len(set(map(cfg.fingerprint, alike))) == 1 and not apart:
        idle = "".join(f" ({knob}: {why})" for knob, why in cfg.not_effective(sides[1], device).items())
        hint = f"change a knob, or its seed by at least {most} to see the noise"
        raise ConfigError(f"{' '.join(asked[1])}: is what A is here, on the same seeds{idle}; {hint}")
    if 0 < abs(apart) < most:
        seed, allowed = sides[1].seed - confirmation.SEED_OFFSET, f"A's, or at least {most} away from it"
        raise ConfigError(
            f"seed: {seed} is not allowed: with {most} pairs both sides would use some seeds; allowed: {allowed}"
        )


def _check(config: Systems, say: Callable[[str], None]) -> None:
    from tunediff.training import check  # imports torch

    found = check.before_search(config, say)
    for text in [*found["warnings"], *(f"train(trial) never reads the knob {knob}" for knob in found["unread"])]:
        say(f"WARNING: {cfg.of(config).title}: {text}")


def _needs(configs: Sequence[Systems]) -> tuple[list[int], list[str], str, bool]:
    """What `resources.divided` takes besides the machine."""
    sizes = sorted({config.parallel.workers for config in configs})
    return sizes, [config.compile.mode for config in configs], "command line", True


# ----------------------------------------------------------------------------------------------------------- its runs
def _run(told: Pairs, address: str | None, say: Callable[[str], None]) -> None:
    """Run pairs until it is decided."""
    if told.over:
        return
    if warning := experiment.foreign(told.folder):
        print(f"WARNING: {warning}", file=sys.stderr)
    from tunediff.report.pairs import so_far  # imports matplotlib
    from tunediff.tuning import rounds  # imports Ray
    from tunediff.tuning.messages import Plan

    folder, metric = told.folder, told.metric
    rivals = [rounds.Rival(config, {"side": side}) for config, side in zip(told.configs, pairs.SIDES, strict=True)]
    needs = _needs(told.configs)

    def shared(machine: resources.Machine) -> resources.Share:
        return resources.divided(machine, *needs)

    def over() -> bool:
        now = pairs.read(folder)
        if now.runs:
            say(so_far(now))
        return now.over

    def greet(context: Any) -> None:
        if url := getattr(context, "dashboard_url", None):
            say(f"dashboard http://{url} (loopback only; token: `ray get-auth-token`)")
        say(f"at most {told.most} pairs × 2 × {cli.seconds(told.budget_s)} training; results {folder}")

    with contextlib.ExitStack() as stack:
        stack.enter_context(experiment.alone(folder))
        stack.enter_context(experiment.noted(folder))
        slots = stack.enter_context(experiment.workers(folder, shared, address, None, greet))
        plan = Plan(
            slots=slots.names, experiment=folder, baseline=cfg.to_dict(told.configs[0]), source=folder.name,
            metric=metric.name, mode=metric.mode, budget=Budget(told.budget_s, compile_charged=told.compile_charged),
            deadline_s=4 * told.budget_s + 900, evaluates=True, fresh=False, profile_steps=0, final={},
        )  # fmt: skip
        listeners = (_teller(folder, slots.actors[0], say), lambda *_: experiment.alive(folder))
        rounds.run(folder, rivals, told.most, plan, listeners, over)


def _teller(folder: Path, slot: Any, say: Callable[[str], None]) -> Callable[[str, str, Mapping[str, Any]], None]:
    """Says how each run ends, here and on Ray's pages."""

    def tell(event: str, name: str, content: Mapping[str, Any]) -> None:
        if event == "point":
            return
        run, words = record.read_trial(folder / "trials" / name), f"{content['side']} seed {content['seed']}"
        if event == "end" and run is not None:
            ended = [run.status or "", run.reason]
            if run.points and run.status == "ok":
                last, metric = run.points[-1], cfg.of(run.configuration).objective
                value = cli.number(last.get(metric.name))
                ended = [f"{last.get('label', metric.label)} {value} at {last.train_s:.1f} s"]
                ended.append(f"{last.samples / last.train_s:,.0f} {cfg.of(run.configuration).unit}/s")
            words = "  ".join([words, *filter(None, ended)])
            say(words)
        slot.note.options(name=words[:200]).remote(words)

    return tell


if __name__ == "__main__":
    sys.exit(main())
