"""Collect and print the result of a search: `key: value` lines, tables and sentences, or JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tunediff import analysis
from tunediff.analysis import Results, confirming_runs, statistics
from tunediff.analysis.comparison import Comparison
from tunediff.analysis.evidence import Evidence
from tunediff.analysis.pareto import pareto_table
from tunediff.core import text
from tunediff.core.files import study_url
from tunediff.report import outputs, result_json, study, verdicts, words
from tunediff.report.headline import headline
from tunediff.report.html import PAGE
from tunediff.report.words import columns, has_value, plain, plain_table
from tunediff.tuning import sessions


def as_json(evidence: Evidence) -> dict[str, Any]:
    """Return the result of a search as `--json` prints it."""
    return text.versioned(_result(evidence, _studied(evidence)))


def _result(evidence: Evidence, studied: study.StudyTable | None) -> dict[str, Any]:
    folder = evidence.results.folder
    confirming = [analysis.read(runs) for runs in sessions.confirming_folders(folder)]
    return values(evidence, sessions.all_spent_s(folder), confirming, studied)


def _studied(evidence: Evidence) -> study.StudyTable | None:
    return study.table(evidence.results) if evidence.results.space.study is not None else None


def lines(evidence: Evidence) -> list[str]:
    """Return the result of a search as lines: values, then tables with their conclusions."""
    results, confirmed, width = evidence.results, evidence.confirmation, columns()
    studied = _studied(evidence)
    output = ["", text.block(_block(_result(evidence, studied), evidence))]
    # The verdict of confirming runs stands below their table.
    remarks = [] if confirmed is not None else [headline(evidence)]
    remarks += [verdicts.disturbed_words(evidence), verdicts.unmoved_words(evidence)]
    remarks += results.clocked.sentences
    output += [f"\n{remark}" for remark in remarks if remark]

    def comparison(compared: Comparison, heading: str = "") -> list[str]:
        table = plain_table(verdicts.comparison_table(compared, compact=True), width)
        return ["", *filter(None, [heading]), table, "", *verdicts.conclusions(compared)]

    if evidence.compared is not None:
        output += comparison(evidence.compared)
    if results.space.cost is not None:
        front = pareto_table(results)
        rows = [
            [text.number(value) if has_value(value) else "" for value in row]
            for row in front.to_numpy().tolist()
        ]
        table = plain_table([list(map(str, front.columns)), *rows], width, knobs=-1)
        output.append(f"\nPareto front, from the best value to the lowest cost:\n{table}")
    if confirmed is not None:
        table = plain_table(verdicts.confirmation_table(confirmed), width)
        output += ["", table, "", *verdicts.sentences(confirmed)]
    if studied is not None:
        output += ["", *filter(None, [studied.study.title]), plain_table(studied.cells(50))]
        output += ["", *studied.notes()]
    return output


def _block(result: Mapping[str, Any], evidence: Evidence) -> dict[str, Any]:
    """Return the lines of `key: value` above the tables and sentences that say the rest."""
    noise, near = evidence.noise, ", ".join(result["within_noise_of_best"])
    statuses = {status: count for status, count in result["statuses"].items() if count}
    lines = {
        "search": result["search"],
        "trials": result["trials"],
        **statuses,
        **result,
        "noise": verdicts.noise_words(noise, result["metric"]) if noise is not None else None,
        "within_noise_of_best": near or "none" if noise is not None else None,
        "disturbed_trials": result["disturbed_trials"] or None,
        "unmoved_trials": result["unmoved_trials"] or None,
    }
    hidden = ("statuses", "objective", "direction", "cost_metric", "seeds", "headline")
    for name in (*hidden, "confirm_runs_at_once", "clock", "start_up_share"):
        del lines[name]
    confirmed = evidence.confirmation
    if confirmed is None or confirmed.metric == evidence.results.metric:
        del lines["confirmed_metric"]  # else it is the metric of another protocol
    leader = confirmed.leader if confirmed is not None else None
    if (
        confirmed is not None
        and leader is not None
        and (bias := confirming_runs.bias(confirmed, leader))
    ):
        lines["value_on_new_seeds"] = words.with_sd(bias[1])
    return plain(lines)


def values(
    evidence: Evidence,
    wall_s: float,
    confirming: Sequence[Results] = (),
    studied: study.StudyTable | None = None,
) -> dict[str, Any]:
    """Return the result of a search as typed values by name: see `result_json.search`.

    wall_s: seconds of all its sessions. confirming: their results; all seconds include theirs.
    """
    more = _costs(evidence.results, wall_s, confirming) | _files(evidence)
    return result_json.search(evidence, more, studied).model_dump()


def _costs(results: Results, wall_s: float, confirming: Sequence[Results]) -> dict[str, Any]:
    """Return the seconds of a search by part, and what else it used, with its confirming runs."""
    runs = [results, *confirming]
    parts = statistics.totals([run.seconds() for run in runs])
    again = statistics.totals([run.seconds() for run in confirming])
    training_s = parts["train"] + parts["data_wait"]
    costs = {
        "wall_s": wall_s,
        "training_s": training_s,
        **statistics.totals([run.used() for run in runs]),
        "overhead_s": max(0.0, wall_s - sum(parts.values())),
        "clock": results.clocked.kind,
        "start_up_share": results.clocked.start_up_share,
        "confirm_wall_s": sum(sessions.spent_s(run.folder) for run in confirming),
        "confirm_training_s": again.get("train", 0.0) + again.get("data_wait", 0.0),
    }
    for part in ("data_wait", "compile", "evaluation", "checkpoint", "setup"):
        costs[f"{part}_s"] = parts[part]
    return costs


def _files(evidence: Evidence) -> dict[str, str]:
    """Return the files that a search has written, and the commands that continue from here."""
    folder, space, best = evidence.results.folder, evidence.results.space, evidence.best
    names = {"results": "", "table": "trials.csv", "curves": "curves.png"}
    if evidence.compared is not None:
        names["comparison"] = "comparison.png"
    if space.cost is not None:
        names["pareto"] = "pareto.csv"
    if evidence.confirmation is not None:
        names["confirmation"] = outputs.CONFIRMATION
    if space.study is not None:
        names["study_table"] = "study.md"
        if space.study.has_figure:
            names["study_figure"] = "study.png"
    if best is not None and (folder / "trials" / best.name / "samples.png").exists():
        names["samples"] = f"trials/{best.name}/samples.png"
    if (folder / PAGE).is_file():
        names["report"] = PAGE
    files = {key: str(folder / name) for key, name in names.items()}
    files["study"] = study_url(folder / "study.db")
    if best is not None:
        files["export"] = text.command("export", folder.name, storage=folder.parent)
    return {"report": text.command("report", folder.name, storage=folder.parent), **files}
