"""The result of a search as values by name: what its last lines and `--json` say."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from tunediff import analysis, cli
from tunediff.analysis import Results, confirmation, statistics
from tunediff.analysis.comparison import Comparison, speedup_values
from tunediff.analysis.confirmation import Confirmation, longer_budgets
from tunediff.analysis.evidence import Evidence
from tunediff.analysis.noise import unmoved
from tunediff.analysis.statistics import Estimate
from tunediff.core import text
from tunediff.core import trial_record as record
from tunediff.core.trial_record import TrialRecord
from tunediff.report import outputs, result_json, study_table, verdicts, words
from tunediff.report.result_json import records
from tunediff.report.words import columns, is_known, plain_table
from tunediff.tuning import sessions
from tunediff.tuning.study_url import study_url


def conclude(found: Results, confirmed: Confirmation | None, as_json: bool) -> None:
    """Print the result."""
    known = Evidence(found, confirmed)
    compared = known.compared
    studied = study_table.table(found) if found.space.study is not None else None
    front = found.pareto_table() if found.space.cost is not None else None
    confirming = [analysis.read(folder) for folder in sessions.confirming_folders(found.folder)]
    block = values(known, sessions.all_spent_s(found.folder), confirming)
    if confirmed is not None:
        block |= verdicts.block(confirmed) | {"confirmation": str(outputs.confirmation(confirmed)["confirm.md"])}
    if as_json:
        longer = longer_budgets(confirmed.compared.found, analysis.read) if confirmed is not None else []
        cli.print_json(result_json.search(known, block, studied, longer))
        return
    remarks = [verdicts.disturbed_words(known), verdicts.unmoved_words(found)]
    said = ["", text.block(block), *(f"\n{remark}" for remark in remarks if remark)]
    if compared is not None:
        table = plain_table(verdicts.comparison_table(compared, compact=True), columns())
        said += ["", table, "", *verdicts.conclusions(compared)]
    if front is not None:
        rows = [[text.number(value) if is_known(value) else "" for value in row] for row in front.to_numpy().tolist()]
        lines = plain_table([list(map(str, front.columns)), *rows], columns(), words=-1)
        said.append(f"\nPareto front, from the best value to the lowest cost:\n{lines}")
    if confirmed is not None:
        said += ["", plain_table(verdicts.confirmation_table(confirmed), columns()), "", *verdicts.sentences(confirmed)]
        for one in longer_budgets(confirmed.compared.found, analysis.read):
            table = plain_table(verdicts.comparison_table(one, compact=True), columns())
            budget = words.duration(one.found.space.budget.per_trial_s)
            said += ["", f"With {budget}:", table, "", *verdicts.conclusions(one)]
    if studied is not None:
        said += ["", *filter(None, [studied.study.title]), studied.text(columns())]
    print("\n".join(said))


def values(known: Evidence, wall_s: float, confirming: Sequence[Results] = ()) -> dict[str, Any]:
    """The result of a search for people, `key: value`; `--json` is `result_json.search`.

    `wall_s`: of all its sessions; it and all other seconds include those of the `confirming` runs.
    """
    found, best, compared = known.found, known.best, known.compared
    parts, folder, study = _totals([one.seconds() for one in (found, *confirming)]), found.folder, found.space.study
    again = _totals([one.seconds() for one in confirming])
    statuses = collections.Counter(trial.status or "unfinished" for trial in found.trials)
    block: dict[str, Any] = {
        "search": folder.name,
        "trials": len(found.trials),
        **{status: statuses[status] for status in (*record.STATUSES, "unfinished") if status in statuses},
    }
    if best is not None:
        block |= _best(known, best) if compared is None else _best_of_seeds(compared, best)
        block |= _speedup(known, best) | verdicts.noise_block(known)
    if known.told is None and (why := confirmation.nothing_to_confirm(found)):
        block["nothing_to_confirm"] = why
    if count := sum(map(analysis.disturbed, found.trials)):
        block["disturbed_trials"] = count
    if count := unmoved(found):
        block["unmoved_trials"] = count
    training = parts["train"] + parts["data_wait"]
    block |= {
        "wall_s": wall_s,
        "training_s": training,
        **_totals([one.used() for one in (found, *confirming)]),
        **{f"{part}_s": parts[part] for part in ("data_wait", "compile", "evaluation", "checkpoint", "setup")},
        "overhead_s": max(0.0, wall_s - sum(parts.values())),
        "training_share": training / wall_s if wall_s else 0.0,
        "confirm_wall_s": sum(sessions.spent_s(one.folder) for one in confirming),
        "confirm_training_s": again.get("train", 0.0) + again.get("data_wait", 0.0),
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
    block["study"] = study_url(folder / "study.db")
    if best is not None:
        if (shown := folder / "trials" / best.name / "samples.png").exists():
            block["samples"] = str(shown)
        block["export"] = text.command("export", folder.name, storage=folder.parent)
    return block | {"report": text.command("report", folder.name, storage=folder.parent)}


def _totals(blocks: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """Return the sum of each number over all blocks that have it."""
    totals: dict[str, float] = {}
    for block in blocks:
        for name, value in block.items():
            if value is not None:
                totals[name] = totals.get(name, 0.0) + value
    return totals


def _best(known: Evidence, best: TrialRecord) -> dict[str, Any]:
    """The best trial of a search with one seed, beside the baseline, which counts with the mean of its runs."""
    found, label = known.found, known.found.label
    runs = {"best": known.runs(best), "baseline": known.runs(known.baseline)}
    block: dict[str, Any] = {"best_trial": best.name, "best_configuration": text.knobs(found.changed(best))}
    block |= {f"{what}_{label}": statistics.mean(values) for what, values in runs.items()}
    if (many := len(runs["baseline"])) > 1:
        block["baseline_is"] = f"mean of its {many} runs"
    return block


def _speedup(known: Evidence, best: TrialRecord) -> dict[str, Any]:
    """How many times sooner the best is as good as the baseline, or why that is not determined."""
    speedup = known.speedup(best)
    if isinstance(speedup, str):
        return {"speedup": words.speedup(speedup)}
    ends: dict[str, Any] = {name: value for name, value in speedup_values(speedup).items() if value is not None}
    if speedup.at_least:
        ends = {"speedup": words.estimated(speedup)}
    seconds = {} if speedup.low else {"seconds_to_baseline": known.seconds_to_baseline(best)}
    seconds = {name: value for name, value in seconds.items() if value is not None}
    return {**ends, **seconds, "speedup_means": speedup_means(known.found, speedup)}


def speedup_means(found: Results, speedup: Estimate) -> str:
    """What a printed speed-up is: a lower bound, a mean with its interval, or the ratio of one pair of runs."""
    ratio = f"baseline's {found.clock.seconds} / those of the best until as good"
    ratio = f"{found.unit}/s of the best / the baseline's" if found.by_rate else ratio
    over = f", geometric mean over {speedup.runs} seeds" if speedup.runs > 1 else ""
    if speedup.at_least:
        return f"lower bound: {ratio}{over}; as good at the first evaluation already, there is no upper bound"
    return f"{'mean with 95 % interval' if speedup.low else 'one pair of runs'}: {ratio}{over}"


def _best_of_seeds(compared: Comparison, best: TrialRecord) -> dict[str, Any]:
    """The best configuration over the seeds, beside the baseline; `best` is one of its runs."""
    rows, mean, label = records(compared.table()), f"{compared.metric}_mean", compared.found.label
    row = rows[compared.groups.index(compared.of(best))]
    base = rows[0] if compared.baseline is not None else {}
    block = {"best_trial": best.name, "best_configuration": row["configuration"], "best_verdict": row["verdict"]}
    block |= {f"best_{label}": row[mean], f"baseline_{label}": base.get(mean)}
    return block | {"means_over": f"{row['finished']} seeds"}
