"""Judge two public records from their own logs: modded-nanogpt and AlgoPerf 0.5.

    python -m benchmarks.public_records read MODDED_NANOGPT SUBMISSIONS_ALGORITHMS TARGETS.json
    python -m benchmarks.public_records algoperf      # the recount and its ranks
    python -m benchmarks.public_records track1        # 15 records beside the prior one, run again
    python -m benchmarks.public_records track3        # the noise of a run of track 3
    python -m benchmarks.public_records rule          # what p < 0.01 lets pass, and how many runs it needs
    python -m benchmarks.public_records figures       # both figures of the page
    python -m benchmarks.public_records proofs        # a proof folder for each record, and AlgoPerf's

`read` takes work trees of KellerJordan/modded-nanogpt and mlcommons/submissions_algorithms and
writes the parsed numbers to ray_results/reference/public-records: no log is copied. The other
commands, and `tunediff judge` on the folders there, need nothing else.
"""

from __future__ import annotations

import collections
import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from tunediff.api.finished import judge
from tunediff.core.target import Target
from tunediff.finished import statistics
from tunediff.finished.runs import FinishedRun, RunReader
from tunediff.report.result import Result

PARSED = Path(__file__).parent.parent / "ray_results" / "reference" / "public-records"
FIGURES = Path(__file__).parent.parent / "docs" / "images"
TARGET, MARGIN = 3.28, 0.001
RULE_LEVEL, RULE_MARGIN, RULE_SD = 0.01, 0.0015, 0.0013
"""Of the rules: p-value; how far below the target records aim; the noise of a run."""
TRACK_1 = {
    "2025-12-21_SmoothedScalars": ("12-19-Baseline", "12-21-Smoothed-Scalars"),
    "2025-12-31_GatesToCompiledAdam": ("12-29-baseline", "12-31-gates-to-adam-20stps"),
    "2026-01-18_UnifiedOptimizers": ("baseline", "unified-optimizer"),
    "2026-01-24_ImprovedLMHead": ("baseline_retime", "record"),
    "2026-02-16_FlattenForward": ("baseline", "pr233"),
    "2026-02-28_TransposeCopyBackward": ("baseline", "this_pr"),
    "2026-03-22_VarlenMaxDocs": ("baseline", "combined"),
    "2026-04-22_MuddFormer": ("baseline-s1480", "this_pr_v3"),
    "2026-04-29_XSAGatedLayers": ("baseline-s1440", "this_pr_v1-s1410"),
    "2026-05-19_FP8MLPUpProj": ("baseline", "this_record"),
    "2026-05-20_BigramsSignTrick": ("baseline", "pr299"),
    "2026-05-27-MuddGatedAndDC": ("xsa-baseline-s1385", "this_pr_v3"),
    "2026-06-11_RecursiveFromBest": ("baseline_pr299", "this_pr"),
    "2026-07-13_PrefixTokenPrediction": ("baseline-1390-8x", "prefix-1375-8x"),
    "2026-07-17_FP8DownProjection": ("baseline", "this_pr"),
}
"""Records whose pull request has runs of the prior record beside its own; found by hand, by the
names of the folders."""
TIME = r"train_time:([\d.]+)ms"
EXTERNAL = "previous_leaderboards/algoperf_v05/logs/external_tuning"
RISING = ("ssim", "mean_average_precision", "bleu", "accuracy")
LONGEST_RATIO, GRID, RESAMPLES = 4.0, 301, 1_000
"""AlgoPerf's performance profile goes from 1 to 4 times the best time."""


def write(name: str, rows: list[dict[str, Any]]) -> None:
    """Write rows of parsed numbers as JSON lines."""
    path = PARSED / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows(name: str) -> list[dict[str, Any]]:
    """Return rows of parsed numbers."""
    return [json.loads(line) for line in (PARSED / name).read_text().splitlines()]


def _row(run: FinishedRun) -> dict[str, Any]:
    return {"run": run.name, "val_loss": run.value, "seconds": run.seconds, "step": run.length}


# ---- modded-nanogpt
def read_nanogpt(tree: Path) -> None:
    """Write a file for each side of a record of track 1, and one for track 3."""
    reader = RunReader(objective="val_loss", time=TIME)
    for record, sides in TRACK_1.items():
        for label, folder in zip(("baseline", "record"), sides, strict=True):
            runs = reader.read(str(tree / "records" / "track_1_short" / record / folder))
            write(f"nanogpt/{record}/{label}.jsonl", [_row(run) for run in runs])
    runs = reader.read(str(tree / "records" / "track_3_optimization" / "results"))
    write("nanogpt-track-3.jsonl", [_row(run) for run in runs if run.value is not None])


def track3() -> None:
    """Print the standard deviation of a run's final loss, pooled over results of five or more."""
    groups = collections.defaultdict[tuple[str, float], list[float]](list)
    for row in rows("nanogpt-track-3.jsonl"):
        groups[row["run"].rpartition("/")[0], row["step"]].append(row["val_loss"])
    large = [values for values in groups.values() if len(values) >= 5]
    sds = np.array([np.std(values, ddof=1) for values in large])
    freedom = np.array([len(values) - 1 for values in large])
    pooled = math.sqrt(float((sds**2 * freedom).sum() / freedom.sum()))
    print(
        f"results: {len(large)}, runs: {sum(map(len, large))}, degrees of freedom: {freedom.sum()}"
    )
    print(
        f"sd of a run: {pooled:.5f} (least {sds.min():.5f}, most {sds.max():.5f}); the rule's: 0.0013"
    )


def judged(out: Path | None = None) -> dict[str, Result]:
    """Return each record of track 1 beside the prior one, as `tunediff judge` has it; `out`: where
    proof folders are written."""
    found = {}
    for record in TRACK_1:
        files = [PARSED / "nanogpt" / record / f"{side}.jsonl" for side in ("baseline", "record")]
        found[record] = judge(
            *files, objective="val_loss", time="seconds", better="time", one_sided=True,
            margin=MARGIN, target=f"val_loss<={TARGET}", out=out and out / record,
        )  # fmt: skip
    return found


def track1() -> None:
    """Print each record of track 1 beside the prior one, which its authors ran again."""
    print("| record | runs | seconds, ratio (90 %) | loss, difference | no worse by 0.001, p"
          " | meets 3.28, p | prior record meets it, p | runs needed |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    columns = collections.defaultdict[str, list[float]](list)
    for record, result in judged().items():
        assert result.finished is not None
        old, new = result.finished.sets
        time, loss, margin, target = (
            new.tests[name] for name in ("time", "difference", "no_worse", "meets_target")
        )
        prior = old.tests["meets_target"]
        print(f"| {record} | {old.counted}, {new.counted} | {time.value:.4f}"
              f" ({time.low:.4f} … {time.high:.4f}) | {loss.value:+.5f} | {margin.p:.3f} |"
              f" {target.p:.4f} | {prior.p:.3f} | {new.runs_needed} |")  # fmt: skip
        columns["ratio"].append(time.value or 0.0)
        columns["noise"] += [
            100 * (one.sd or 0.0) / (one.value or 1.0) for one in result.candidates
        ]
        columns["runs"] += [old.counted, new.counted]
        columns["needed"].append(new.runs_needed or 0)
        for name, test in (
            ("time", time),
            ("margin", margin),
            ("target", target),
            ("prior", prior),
        ):
            columns[name].append(test.p)
    many = len(columns["ratio"])
    meet, prior_meet = (sum(p < RULE_LEVEL for p in columns[name]) for name in ("target", "prior"))
    print(
        f"\nratio of the seconds: {_range(columns['ratio'], '.3f')}, p at most"
        f" {max(columns['time']):.4f}; sd of a run's seconds: {_range(columns['noise'], '.2f')} %"
    )
    print(
        f"mean at most {TARGET} at p < {RULE_LEVEL}: {meet} of {many}; the prior record:"
        f" {prior_meet} of {many}"
    )
    print(f"no more than {MARGIN} worse at 5 %: {sum(p < 0.05 for p in columns['margin'])} of {many};"
          f" runs needed: {_range(columns['needed'], '.0f')}, median"
          f" {np.median(columns['needed']):.0f}; there are {_range(columns['runs'], '.0f')}")  # fmt: skip


def _range(values: list[float], form: str) -> str:
    return f"{min(values):{form}} to {max(values):{form}}"


def rule() -> None:
    """Print what a test after each run lets pass, and how many runs a margin needs."""
    for most in (10, 20, 40):
        share = statistics.p_if_repeated(RULE_LEVEL, [most], True)
        print(
            f"mean at the target, tested at {RULE_LEVEL} after each of {most} runs: {100 * share:.1f} % pass"
        )
    for runs in (5, 8, 13, 20):
        error = RULE_SD / math.sqrt(runs)
        power = statistics.power_of(RULE_MARGIN, error, runs - 1, RULE_LEVEL, True)
        print(f"mean {RULE_MARGIN} below the target, {runs} runs: {100 * power:.0f} % pass")
    needed = statistics.runs_needed(RULE_MARGIN, RULE_SD, RULE_LEVEL, True, sets=1)
    print(f"runs to pass in 80 %: {needed}")


# ---- AlgoPerf
def read_algoperf(tree: Path, targets: Path) -> None:
    """Write the seconds to the validation target of every trial under external tuning."""
    content = json.loads(targets.read_text())
    found = list[dict[str, Any]]()
    pattern = re.compile(r"([^/]+)/study_(\d+)/(.+?)_(?:jax|pytorch)/trial_(\d+)/")
    for workload in content["base_workloads"] + content["held_out_workloads"]:
        about = content["workloads"][workload]
        metric = f"validation/{about['target_metric_name']}"
        is_rising = about["target_metric_name"] in RISING
        until = Target(metric, ">=" if is_rising else "<=", about["validation_target_value"])
        reader = RunReader(objective=metric, time="accumulated_submission_time", until=until)
        for framework in ("jax", "pytorch"):
            place = f"*/study_*/{workload}_{framework}/trial_*/eval_measurements.csv"
            if not any((tree / EXTERNAL).glob(place)):
                continue
            for run in reader.read(str(tree / EXTERNAL / place)):
                match = pattern.search(f"{run.name}")
                assert match is not None
                found.append(
                    {
                        "submission": match[1],
                        "workload": workload,
                        "study": int(match[2]),
                        "trial": int(match[4]),
                        "seconds": run.seconds,
                    }
                )
    pd.DataFrame(found).to_csv(PARSED / "algoperf-0.5.csv", index=False)


Times = dict[str, dict[str, np.ndarray[Any, np.dtype[np.float64]]]]


def study_times() -> Times:
    """Return the best seconds of each study [studies], by submission and workload; ∞: a miss."""
    trials = pd.read_csv(PARSED / "algoperf-0.5.csv").fillna({"seconds": math.inf})
    best = trials.groupby(["submission", "workload", "study"], sort=False)["seconds"].min()
    times: Times = collections.defaultdict(dict)
    groups: Any = best.groupby(level=[0, 1], sort=False)
    for (submission, workload), studies in groups:
        times[submission][workload] = studies.to_numpy()
    return times


def scores(times: Times, draw: np.random.Generator | None = None) -> dict[str, float]:
    """Return AlgoPerf's score of each submission, the area under its performance profile.

    A workload counts by the median of its studies, and as missed where its held-out variant is.
    draw: studies are drawn again, with replacement.
    """

    def median(values: Any) -> float:
        if values is None:
            return math.inf
        return float(np.median(values if draw is None else draw.choice(values, len(values))))

    names = {name for of in times.values() for name in of}
    held_out = {name for name in names if any(name != o and name.startswith(o) for o in names)}
    base = sorted(names - held_out)
    variants = {
        name: next((h for h in sorted(held_out) if h.startswith(name)), None) for name in base
    }
    medians = dict[str, list[float]]()
    for submission, of in times.items():
        medians[submission] = []
        for name in base:
            held = variants[name]
            met = held is None or math.isfinite(median(of.get(held)))
            medians[submission].append(median(of.get(name)) if met else math.inf)
    table = np.array([medians[submission] for submission in times])
    with np.errstate(invalid="ignore"):
        ratios = np.where(np.isfinite(table), table / table.min(axis=0), math.inf)
    taus = np.linspace(1, LONGEST_RATIO, GRID)
    profile = (ratios[:, :, None] <= taus).mean(axis=1)
    areas = np.trapezoid(profile, taus, axis=1) / (LONGEST_RATIO - 1)
    return dict(zip(times, map(float, areas), strict=True))


class Place(NamedTuple):
    """The place of a submission, with 95 % intervals over the studies."""

    submission: str
    score: float
    scores: tuple[float, float]
    ranks: tuple[int, int]
    ahead_of_next: float | None


def places() -> list[Place]:
    """Return the submissions in the order of their scores."""
    times, draw = study_times(), np.random.default_rng(0)
    found = scores(times)
    order = sorted(found, key=lambda name: -found[name])
    resampled = [scores(times, draw) for _ in range(RESAMPLES)]
    ranks = collections.defaultdict[str, list[int]](list)
    for one in resampled:
        for place, name in enumerate(sorted(one, key=lambda name: -one[name]), 1):
            ranks[name].append(place)
    result = []
    for name, behind in zip(order, [*order[1:], None], strict=True):
        low, high = np.quantile([one[name] for one in resampled], [0.025, 0.975])
        first, last = np.quantile(ranks[name], [0.025, 0.975], method="nearest")
        ahead = behind and float(np.mean([one[name] > one[behind] for one in resampled]))
        result.append(Place(name, found[name], (low, high), (int(first), int(last)), ahead or None))
    return result


def algoperf() -> None:
    """Print each submission's score and rank, with 95 % intervals over the studies."""
    print("| rank | submission | score | 95 % | rank, 95 % | ahead of the next in |")
    print("|---|---|---|---|---|---|")
    for rank, place in enumerate(places(), 1):
        (low, high), (first, last) = place.scores, place.ranks
        share = "" if place.ahead_of_next is None else f"{100 * place.ahead_of_next:.0f} %"
        print(f"| {rank} | {place.submission} | {place.score:.3f} | {low:.3f} … {high:.3f} |"
              f" {first} … {last} | {share} |")  # fmt: skip


# ---- proof folders
def proofs() -> None:
    """Write a proof folder of each record, and of AlgoPerf: each submission beside the baseline,
    by the median of the studies of each workload. `tunediff verify` checks them."""
    shutil.rmtree(PARSED / "proofs", ignore_errors=True)
    judged(PARSED / "proofs")
    for submission, workloads in study_times().items():
        medians = {name: float(np.median(times)) for name, times in sorted(workloads.items())}
        content = [
            {"run": name, "met": met, "seconds": median if met else None}
            for name, median in medians.items() for met in [int(math.isfinite(median))]
        ]  # fmt: skip
        write(f"algoperf/{submission}.jsonl", content)
    files = [PARSED / "algoperf" / f"{place.submission}.jsonl" for place in places()]
    files.sort(key=lambda file: file.stem != "baseline")  # stable: the others by their scores
    result = judge(
        *files, objective="met", mode="max", target="met>=1", outcome="time", better="time",
        time="seconds", paired_by="(.+)", out=PARSED / "proofs" / "algoperf",
    )  # fmt: skip
    print("\n".join(result.summary))


# ---- figures
def figures() -> None:
    """Draw both figures of the page."""
    found = judged()
    figure, (left, right) = plt.subplots(1, 2, sharey=True, figsize=(9, 5), layout="constrained")
    for row, result in enumerate(found.values()):
        assert result.finished is not None
        new = result.finished.sets[1]
        both = (left, new.tests["time"], 100.0), (right, new.tests["difference"], 1000.0)
        for axes, test, scale in both:
            assert test.value is not None
            assert test.low is not None
            assert test.high is not None
            shift = 1.0 if axes is left else 0.0
            ends = [scale * (value - shift) for value in (test.low, test.high)]
            axes.plot(ends, [row, row], color="tab:blue")
            axes.plot(scale * (test.value - shift), row, "o", color="tab:blue")
    left.set_yticks(range(len(found)), list(found))
    left.invert_yaxis()
    left.set_xlabel("seconds of a run, change in %")
    right.set_xlabel("validation loss, change in thousandths")
    left.axvline(0, color="gray", linewidth=0.8)
    right.axvline(0, color="gray", linewidth=0.8)
    right.axvline(1000 * MARGIN, color="tab:red", linewidth=0.8, linestyle="--")
    figure.suptitle(
        "Fifteen records beside the prior one: 90 % intervals; dashed: the margin of 0.001"
    )
    figure.savefig(FIGURES / "records-nanogpt.png", dpi=110)

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    order = places()
    for row, place in enumerate(order, 1):
        axes.plot(place.ranks, [row, row], color="tab:blue")
        axes.plot(row, row, "o", color="tab:blue")
    axes.set_yticks(range(1, len(order) + 1), [place.submission for place in order])
    axes.set_xticks(range(1, len(order) + 1))
    axes.invert_yaxis()
    axes.set_xlabel("rank, and in which places 95 % of resampled studies put it")
    figure.savefig(FIGURES / "records-algoperf.png", dpi=110)


PRINTED = (track1, track3, rule, algoperf, figures, proofs)


def main(words: list[str]) -> None:
    """See the module."""
    if words[:1] == ["read"] and len(words) == 4:
        read_nanogpt(Path(words[1]))
        read_algoperf(Path(words[2]), Path(words[3]))
    elif len(words) == 1 and words[0] in (commands := {c.__name__: c for c in PRINTED}):
        commands[words[0]]()
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
