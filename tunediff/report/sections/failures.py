"""How trials ended that have no result, and with which values that happens."""

from __future__ import annotations

from tunediff.report.files import Files
from tunediff.report.html import Html, el, join, table
from tunediff.report.subject import Subject, lead, note
from tunediff.report.words import cut, some
from tunediff.results import failed
from tunediff.results.effects import failures_table, suspects


def failures(subject: Subject, files: Files) -> Html | None:
    """Left out before the first trial ended."""
    found = subject.found
    ended = [trial for trial in found.trials if trial.finished]
    if not ended and not subject.unreadable:
        return None
    bad, stopped = sum(map(failed, ended)), sum(trial.status == "pruned" for trial in ended)
    said = f"{bad:,} of {some(len(ended), 'trial')} that ended failed" if bad else "No trial failed"
    said += f"; {stopped:,} {'was' if stopped == 1 else 'were'} stopped early" if stopped else ""
    parts: list[object] = [lead(f"{said}.")]
    frame = failures_table(found)
    if len(frame):
        files.csv("failures", frame)
        rows = [[s, cut(why, 300), cut(names, 48), trials] for s, trials, why, names in frame[:30].to_numpy().tolist()]
        parts.append(table(["status", "reason (of the first)", "trials", "how many"], rows, words=3))
        parts.append(note(files.links("failures")))
    if hints := suspects(found, subject.effects):
        words = "; ".join(f"{one.failed} of {one.trials} with {one.knob} = {one.value}" for one in hints)
        parts.append(el("p", f"More than twice as often as elsewhere trials failed with these values: {words}."))
    if disturbed := sum(any(point.get("disturbed") is True for point in trial.points) for trial in found.trials):
        said = (
            f"During {disturbed:,} of {some(len(found.trials), 'trial')} others used the same cores: their speed, and "
            "what they learned in their seconds, may be too low."
        )
        parts.append(el("p", said))
    if left := subject.unreadable:
        said = f"{some(len(left), 'journal was', 'journals were')} not understood and left out:"
        parts += [el("p", said), table(["trial", "why"], [[*item] for item in left.items()][:20], words=2)]
    return join(*parts)
