"""Collect and print the result of a search: `key: value` lines, tables and sentences, or JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tunediff import analysis, cli
from tunediff.analysis import Results, statistics
from tunediff.analysis.comparison import Comparison
from tunediff.analysis.confirmation import longer_budgets
from tunediff.analysis.evidence import Evidence
from tunediff.analysis.pareto import pareto_table
from tunediff.core import text
from tunediff.core.files import study_url
from tunediff.report import outputs, page, result_json, study_table, verdicts, words
from tunediff.report.headline import headline
from tunediff.report.words import columns, has_value, plain_table
from tunediff.tuning import sessions


def as_json(evidence: Evidence) -> dict[str, Any]:
    """Return the result of a search as `--json` prints it."""
    return cli.versioned(_result(evidence, _studied(evidence), _longer(evidence)))


def _result(
    evidence: Evidence, studied: study_table.Table | None, longer: Sequence[Comparison]
) -> dict[str, Any]:
    folder = evidence.results.folder
    confirming = [analysis.read(runs) for runs in sessions.confirming_folders(folder)]
    return values(evidence, sessions.all_spent_s(folder), confirming, studied, longer)


def _studied(evidence: Evidence) -> study_table.Table | None:
    return study_table.table(evidence.results) if evidence.results.space.study is not None else None


def _longer(evidence: Evidence) -> list[Comparison]:
    confirmed = evidence.confirmation
    return (
        longer_budgets(confirmed.compared.results, analysis.read) if confirmed is not None else []
    )


def lines(evidence: Evidence) -> list[str]:
    """Return the result of a search as lines of text: values first, then tables, each with its
    conclusions."""
    results, compared, confirmed = evidence.results, evidence.compared, evidence.confirmation
    studied, longer = _studied(evidence), _longer(evidence)
    front = pareto_table(results) if results.space.cost is not None else None
    block = _block(_result(evidence, studied, longer), evidence)
    first = (
        headline(evidence) if confirmed is None else ""
    )  # else it stands below the table of the confirming runs
    remarks = [
        first,
        verdicts.disturbed_words(evidence),
        verdicts.unmoved_words(results),
    ]
    output = ["", text.block(block), *(f"\n{remark}" for remark in remarks if remark)]
    if compared is not None:
        table = plain_table(verdicts.comparison_table(compared, compact=True), columns())
        output += ["", table, "", *verdicts.conclusions(compared)]
    if front is not None:
        rows = [
            [text.number(value) if has_value(value) else "" for value in row]
            for row in front.to_numpy().tolist()
        ]
        pareto = plain_table([list(map(str, front.columns)), *rows], columns(), words=-1)
        output.append(f"\nPareto front, from the best value to the lowest cost:\n{pareto}")
    if confirmed is not None:
        output += [
            "",
            plain_table(verdicts.confirmation_table(confirmed), columns()),
            "",
            *verdicts.sentences(confirmed),
        ]
        for comparison in longer:
            table = plain_table(verdicts.comparison_table(comparison, compact=True), columns())
            budget = words.duration(comparison.results.space.budget.per_trial_s)
            output += ["", f"With {budget}:", table, "", *verdicts.conclusions(comparison)]
    if studied is not None:
        output += ["", *filter(None, [studied.study.title]), studied.text(columns())]
    return output


def _block(result: Mapping[str, Any], evidence: Evidence) -> dict[str, Any]:
    """Return what of a result stands in lines of `key: value`, above the tables and sentences that
    say the rest."""
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
    without = {"statuses", "objective", "direction", "cost_metric", "seeds", "headline"}
    confirmed = evidence.confirmation
    if confirmed is None or confirmed.metric == evidence.results.metric:  # else another protocol's
        without.add("confirmed_metric")
    if (
        confirmed is not None
        and confirmed.leader is not None
        and (bias := confirmed.bias(confirmed.leader))
    ):
        lines["value_on_new_seeds"] = words.with_sd(bias[1])
    return result_json.plain({name: value for name, value in lines.items() if name not in without})


def values(
    evidence: Evidence,
    wall_s: float,
    confirming: Sequence[Results] = (),
    studied: study_table.Table | None = None,
    longer: Sequence[Comparison] = (),
) -> dict[str, Any]:
    """Return the result of a search as typed values by name: see `result_json.search`.

    wall_s: seconds of all its sessions. confirming: results of its confirming runs; all seconds
    include theirs.
    """
    more = _costs(evidence.results, wall_s, confirming) | _files(evidence)
    return result_json.search(evidence, more, studied, longer).model_dump()


def _costs(results: Results, wall_s: float, confirming: Sequence[Results]) -> dict[str, Any]:
    """Return the seconds of a search by part, those of its confirming runs included, and what else
    it used."""
    parts = statistics.totals([runs.seconds() for runs in (results, *confirming)])
    again = statistics.totals([runs.seconds() for runs in confirming])
    training = parts["train"] + parts["data_wait"]
    return {
        "wall_s": wall_s,
        "training_s": training,
        **statistics.totals([runs.used() for runs in (results, *confirming)]),
        **{
            f"{part}_s": parts[part]
            for part in ("data_wait", "compile", "evaluation", "checkpoint", "setup")
        },
        "overhead_s": max(0.0, wall_s - sum(parts.values())),
        "training_share": training / wall_s if wall_s else 0.0,
        "confirm_wall_s": sum(sessions.spent_s(runs.folder) for runs in confirming),
        "confirm_training_s": again.get("train", 0.0) + again.get("data_wait", 0.0),
    }


def _files(evidence: Evidence) -> dict[str, str]:
    """Return the files that a search has written, and the commands that continue from here."""
    folder, space, best = evidence.results.folder, evidence.results.space, evidence.best
    files = (
        ("table", "trials.csv", True),
        ("curves", "curves.png", True),
        ("comparison", "comparison.png", evidence.compared is not None),
        ("pareto", "pareto.csv", space.cost is not None),
        ("confirmation", outputs.CONFIRMATION, evidence.confirmation is not None),
        ("study_table", "study.md", space.study is not None),
        ("study_figure", "study.png", space.study is not None and space.study.has_figure),
    )
    block = {"results": str(folder)} | {
        key: str(folder / name) for key, name, exists in files if exists
    }
    block["study"] = study_url(folder / "study.db")
    if best is not None:
        if (shown := folder / "trials" / best.name / "samples.png").exists():
            block["samples"] = str(shown)
        block["export"] = text.command("export", folder.name, storage=folder.parent)
    written, command = (
        folder / page.PAGE,
        text.command("report", folder.name, storage=folder.parent),
    )
    return block | {"report": str(written) if written.is_file() else command}
