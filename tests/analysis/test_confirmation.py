"""The best of a search is run again: planted winners are named, planted noise is not."""

import dataclasses
import json
import math
from unittest import mock

import numpy as np
import pytest

from tests.searches import make, write
from tunediff import analysis, export, search, search_space
from tunediff.analysis import confirming_runs, evaluating, evidence
from tunediff.api import search_setup
from tunediff.config import ConfigError
from tunediff.core.journal import Journal
from tunediff.core.outcomes import Verdict
from tunediff.report import context, reading, sentences
from tunediff.tuning import confirming, experiment, resources, sessions

FILE = {
    "workload": "digits",
    "budget": {"per_trial": "20s"},
    "confirm": {"of": 2, "seeds": 4},
    "trials": [{"loader.batch_size": size} for size in (32, 64, 256, 512)],
}


def write_trials(folder, wanted, ends, final=None):
    """Journals of all points of a search: curves that fall to `ends(batch size, seed)`."""
    for number, point in enumerate(wanted.candidates):
        config = wanted.config(point)
        key = config.loader.batch_size, config.seed
        curve = [(5.0 * index, 1000 * index, ends(*key) * (5 - index)) for index in range(1, 5)]
        place = write(folder, wanted, number, drawn=point, curve=curve)
        if final is not None:
            Journal(place).write("final", steps=4000 // key[0], frechet=final(*key), label="FD (classifier)", kid=0.1)


def searched(tmp_path, ends, **changes):
    write_trials(tmp_path / "night", make(tmp_path / "night", FILE | changes), ends)
    return analysis.read(tmp_path / "night")


def confirmed(found, ends, final=None):
    folder, wanted = confirming.prepare(found)
    write_trials(folder, wanted, ends, final)
    return confirming_runs.confirm(found, analysis.read(folder))


def noise(size, seed, sd=0.05):
    return math.exp(sd * np.random.default_rng(size * 7919 + seed).normal())


# ------------------------------------------------------------------------------------------------------------ the runs
def test_the_best_and_the_baseline_run_again_seed_after_seed_alone(tmp_path):
    found = searched(tmp_path, lambda size, seed: {32: 3.0, 64: 1.0, 128: 2.0, 256: 1.5, 512: 4.0}[size])
    folder, wanted = confirming.prepare(found)
    assert folder == found.folder / "confirm"
    assert wanted.seeds == 4
    order = [(point["seed"], point["loader.batch_size"]) for point in wanted.candidates]
    assert order == [(seed, size) for seed in range(1000, 1004) for size in (128, 64, 256)]
    assert wanted.budget.per_trial_s == 20.0
    assert resources.share(found.space, resources.Machine(16, 8)).slots == 8
    again, same = confirming.prepare(found)  # as --resume does
    assert (again, same.candidates) == (folder, wanted.candidates)
    assert confirming_runs.latest(found) == folder


def test_other_finalists_get_another_folder_and_other_seeds(tmp_path):
    found = searched(tmp_path, lambda size, seed: {32: 3.0, 64: 1.0, 128: 2.0, 256: 1.5, 512: 4.0}[size])
    confirmed(found, lambda size, seed: (1.2 if size == 64 else 2.0) + 0.01 * (-1) ** seed)
    better = Journal(found.folder / "trials" / "t0004")
    better.write("point", index=4, train_s=20.0, samples=9, steps=9, frechet=0.1, seconds={})
    folder, wanted = confirming.prepare(analysis.read(found.folder))
    assert folder.name == "confirm-2"
    assert [point["loader.batch_size"] for point in wanted.candidates[:3]] == [128, 512, 64]
    assert {point["seed"] for point in wanted.candidates} == {2000, 2001, 2002, 2003}, "none that the first ones had"
    write_trials(folder, wanted, lambda size, seed: 2.0 + 0.01 * (-1) ** (seed * size // 64))
    shown = evidence.read(analysis.read(found.folder))
    said = reading.of_search(shown)
    _, other = said.confirmations
    assert (other.name, other.verdict) == ("confirm-2", Verdict.NO_DIFFERENCE)
    assert (said.best, said.verdict) == ("loader.batch_size=64", Verdict.BETTER), "what was confirmed stays so"
    assert shown.best.drawn["loader.batch_size"] == 64
    assert context.read(found.folder).result == said
    assert confirming_runs.latest(analysis.read(found.folder)) == folder
    better.write("point", index=4, train_s=20.0, samples=9, steps=9, frechet=9.0, seconds={})
    assert confirming_runs.latest(analysis.read(found.folder)) == found.folder / "confirm", "the first ones lead again"


def test_a_confirmed_winner_with_a_knob_that_was_not_read_is_found_in_the_search(tmp_path):
    found = searched(
        tmp_path, lambda size, seed: {64: 1.0}.get(size, 2.0),
        trials=[{"loader.batch_size": 64, "optimizer.warmup": 0.1}, {"loader.batch_size": 32}],
    )  # fmt: skip
    winner = Journal(found.folder / "trials" / "t0001")
    winner.write("unread", knobs=["optimizer.warmup"])
    found = analysis.read(found.folder)
    confirmed(found, lambda size, seed: {64: 1.0}.get(size, 2.0) * noise(size, seed, 0.01))
    shown = evidence.read(analysis.read(found.folder))
    assert (shown.best.name, shown.better(shown.best)) == ("t0001", True)


def test_finalists_in_another_order_are_no_other_finalists(tmp_path):
    found = searched(tmp_path, lambda size, seed: {32: 3.0, 64: 1.0, 128: 2.0, 256: 1.5, 512: 4.0}[size])
    folder, _ = confirming.prepare(found)
    better = Journal(found.folder / "trials" / "t0003")
    better.write("point", index=4, train_s=20.0, samples=9, steps=9, frechet=0.1, seconds={})
    assert confirming.prepare(analysis.read(found.folder))[0] == folder


def test_a_search_of_the_baseline_alone_has_nothing_to_confirm(tmp_path):
    found = searched(tmp_path, lambda size, seed: 1.0, trials=[{"loader.batch_size": 128}])
    assert confirming.prepare(found) is None


# --------------------------------------------------------------------------------------------------------- the verdict
def test_a_single_trial_plans_no_confirming_runs(tmp_path):
    """Whatever `confirm:` says: only the baseline runs."""
    content = FILE | {"trials": FILE["trials"][:1], "budget": {"per_trial": "20s", "trials": 1}}
    alone = search_space.parse(content, "night.yaml")
    assert (alone.finalists, alone.most_confirming_runs, alone.confirming_reserve) == (0, 0, 0)
    assert evaluating.Cost.of(alone, {}).parts(1)["confirmation"] == 0
    two = search_space.parse(
        content | {"budget": {"per_trial": "20s", "trials": 2}, "trials": FILE["trials"][:2]}, "x.yaml"
    )
    assert (two.finalists, two.most_confirming_runs) == (1, 8), "one finalist and the baseline, four seeds each"


SESSION = '{"event": "begin", "time": 0, "monotonic_s": 0}\n{"event": "end", "time": 0, "monotonic_s": %d}\n'


def test_the_limit_of_a_search_bounds_its_confirming_runs(tmp_path):
    """Runs of 20 s, three configurations a round: 60 s. The search took 100 s, the first round another 60."""
    budget = {"per_trial": "20s", "total": "170s"}
    found = searched(tmp_path, lambda size, seed: 1.0, budget=budget)
    folder, wanted = confirming.prepare(found)
    (found.folder / "sessions.jsonl").write_text(SESSION % 100)
    assert confirming.has_time(found, folder, wanted)
    assert confirming.pending(found.folder, found.space)
    (folder / "sessions.jsonl").write_text(SESSION % 60)
    assert sessions.all_spent_s(found.folder) == 160
    assert not confirming.has_time(found, folder, wanted)
    assert not confirming.pending(found.folder, found.space), "nothing is left to be done"
    assert evidence.read(analysis.read(found.folder)).confirmation is None, "without a run there is nothing to be told"
    raised = experiment.reopen(found.folder, {"total": "10m"})
    assert confirming.pending(found.folder, raised)


def test_a_resume_confirms_nothing_before_the_trials_have_ended(tmp_path, monkeypatch):
    """Other finalists would take their share of the error."""
    found = searched(tmp_path, lambda size, seed: 2.0)
    (found.folder / "trials" / found.trials[-1].name / "journal.jsonl").unlink()
    monkeypatch.setattr(
        "tunediff.ray_backend.connection.workers", mock.Mock(side_effect=sessions.NotStartedError("no Ray"))
    )
    assert search.main(["--resume", found.folder.name, "--storage", str(tmp_path)]) == 1
    assert not (found.folder / "confirm").exists()


@pytest.mark.parametrize(
    ("words", "confirm"),
    [([], {"of": 2, "seeds": 4}), (["--confirm", "0"], None), (["--confirm", "1"], {"of": 1, "seeds": 4})],
)
def test_confirm_on_the_command_line_sets_the_finalists(tmp_path, this_machine, words, confirm):
    this_machine(2)
    (tmp_path / "night.yaml").write_text(json.dumps(FILE))
    args = search.arguments([str(tmp_path / "night.yaml"), "--storage", str(tmp_path), *words])
    request = search_setup.prepare(args)
    assert request.content.get("confirm") == confirm
    assert request.space.finalists == (confirm or {"of": 0})["of"]


def test_a_planted_winner_is_named(tmp_path):
    worth = {32: 2.1, 64: 1.2, 128: 2.0, 256: 1.9, 512: 2.2}
    found = searched(tmp_path, lambda size, seed: worth[size])
    told = confirmed(found, lambda size, seed: worth[size] * noise(0, seed, 0.2) * noise(size, seed))
    assert told.winner.changed == {"loader.batch_size": 64}
    said = reading.of_search(evidence.Evidence(found, told))
    assert (said.verdict, said.best, 1 < said.counts.leader.value < 2) == ("better", "loader.batch_size=64", True)
    assert 0.5 < told.winner.difference.low < 0.6 < told.winner.difference.high < 0.7
    assert told.ended
    found = told.speedup(told.winner)
    assert 1 < found.low < found.mean < found.high
    assert sentences.headline(said).startswith("loader.batch_size=64 is better than the baseline by more than")


def test_the_final_evaluation_decides_where_there_is_one(tmp_path):
    """By the search's own protocol 64 is better, at full protocol 256 is."""
    changes = {"confirm": {"of": 2, "seeds": 3, "final": {"evaluation.images": 5000, "evaluation.sampler": "ddpm"}}}
    found = searched(tmp_path, lambda size, seed: {64: 1.0, 256: 1.1}.get(size, 2.0), **changes)
    _, wanted = confirming.prepare(found)
    assert wanted.final == {"evaluation.images": 5000, "evaluation.sampler": "ddpm"}
    told = confirmed(
        found,
        lambda size, seed: {64: 1.0, 256: 1.1}.get(size, 2.0) * noise(size, seed, 0.01),
        lambda size, seed: {64: 1.5, 256: 1.2}.get(size, 2.0) * noise(size, seed, 0.01),
    )
    assert told.metric == "final_frechet"
    assert told.winner.changed == {"loader.batch_size": 256}
    assert reading.of_confirmation(told).leader.value == pytest.approx(1.2, abs=0.05)
    assert told.speedup(told.winner)  # by the curves


def test_the_leader_is_named_unless_another_is_clearly_ahead_of_it(tmp_path):
    """Both are better than the baseline: the first was chosen before these runs, the second would be by them."""
    found = searched(tmp_path, lambda size, seed: {64: 1.0, 256: 1.1}.get(size, 2.0))
    near = confirmed(found, lambda size, seed: {64: 1.0, 256: 0.9}.get(size, 2.0) * noise(size, seed))
    assert np.mean(near.challengers[1].outcome.values) < np.mean(near.winner.outcome.values)
    assert near.winner.changed == {"loader.batch_size": 64}
    assert "selected" not in " ".join(sentences.summary(reading.of_confirmation(near)))


def test_a_finalist_is_open_until_the_test_has_ended(tmp_path):
    """After three seeds an interval that is not determined says nothing, after all of them it is the result."""
    logs = {1000: 0.67, 1001: -0.34, 1002: -0.53}

    def ends(size, seed):
        return math.exp(logs.get(seed, 0.5 * (-1) ** seed)) if size == 64 else 1.0

    found = searched(tmp_path, lambda size, seed: {64: 1.0}.get(size, 2.0), confirm={"of": 1, "seeds": 12})
    folder, wanted = confirming.prepare(found)
    for runs, verdict in (
        (1, "open"),
        (4, "open"),
        (6, "open"),
        (24, "no_difference"),
    ):  # killed after the first one, too
        write_trials(folder, dataclasses.replace(wanted, candidates=wanted.candidates[:runs]), ends)
        told = confirming_runs.confirm(found, analysis.read(folder))
        assert {told.verdict, *(one.verdict for one in told.challengers)} == {verdict}
        assert told.ended == (verdict != "open")
        result = reading.of_confirmation(told)
        assert ("significant" in " ".join([*sentences.summary(result), *sentences.so_far(result)])) == told.ended
        assert (told.winner, told.is_conclusive) == (None, told.ended)


def fail(folder, name, status="timeout", **more):
    """Let a run have ended without a result."""
    journal = folder / "trials" / name / "journal.jsonl"
    end = json.loads(journal.read_text().splitlines()[-1]) | {"status": status} | more
    journal.write_text("\n".join([*journal.read_text().splitlines()[:-1], json.dumps(end)]) + "\n")


@pytest.mark.parametrize(
    ("rounds", "names", "process_died", "left"),
    [
        (3, ["t0008"], True, False),
        (1, ["t0001", "t0002"], True, True),
        (1, ["t0001", "t0002"], False, False),
        (1, ["t0000"], True, True),
        (1, ["t0000"], False, False),
    ],
    ids=["decided", "rivals lost", "rivals failed", "baseline lost", "baseline failed"],
)
def test_lost_confirming_runs_are_left_unless_it_is_decided(tmp_path, rounds, names, process_died, left):
    found, folder, _ = confirmed_by_64(tmp_path, rounds)
    for name in names:
        fail(folder, name, "error", process_died=process_died)
    assert confirming_runs.confirm(found, analysis.read(folder)).ended
    assert (confirming.pending(found.folder, found.space) is not None) == left


def test_resume_without_time_keeps_the_verdict_and_why_a_finalist_is_out(tmp_path, capsys):
    """Without its lost run the finalist would count as still in, and the others as too few."""
    found, folder, _ = confirmed_by_64(tmp_path, 3, budget={"per_trial": "20s", "total": "30s"})
    (found.folder / "sessions.jsonl").write_text(SESSION % 100)
    fail(folder, "t0008", "error", process_died=True)
    assert search.main(["--resume", "night", "--storage", str(tmp_path)]) == 0
    assert "best: loader.batch_size=64\n" in capsys.readouterr().out
    assert analysis.read(folder).trials[8].status == "error"


def confirmed_by_64(tmp_path, rounds, **changes):
    """A search and so many rounds of its confirming runs, which 64 wins; their folder and space."""

    def ends(size, seed):
        return {64: 1.0, 256: 1.1}.get(size, 2.0) * noise(size, seed, 0.01)

    found = searched(tmp_path, ends, **changes)
    folder, wanted = confirming.prepare(found)
    write_trials(folder, dataclasses.replace(wanted, candidates=wanted.candidates[: 3 * rounds]), ends)
    return found, folder, wanted


def test_a_finalist_that_fails_in_the_last_round_takes_no_verdict_from_the_others(tmp_path):
    found = searched(tmp_path, lambda size, seed: {64: 1.0, 256: 1.1}.get(size, 2.0), confirm={"of": 2, "seeds": 3})
    folder, wanted = confirming.prepare(found)
    write_trials(folder, wanted, lambda size, seed: {64: 1.0, 256: 1.1}.get(size, 2.0) * noise(size, seed))
    fail(folder, "t0008")
    told = confirming_runs.confirm(found, analysis.read(folder))
    assert told.winner.changed == {"loader.batch_size": 64}
    assert told.challengers[1].difference.verdict == Verdict.FAILS
    assert not confirming.pending(found.folder, found.space)


@pytest.mark.parametrize(
    ("level", "failed", "said"),
    [(3.0, "t0004", "64 is not shown to be better"), (3.0, "t0005", "64 is worse than the baseline")],
)
def test_the_headline_has_the_verdict_of_the_finalist_that_it_names(tmp_path, level, failed, said):
    """One finalist fails on a seed, and the other is worse: what led the search is in the sentence."""
    found = searched(tmp_path, lambda size, seed: {64: 1.0, 256: 1.1}.get(size, 2.0))
    folder, wanted = confirming.prepare(found)
    write_trials(folder, wanted, lambda size, seed: {128: 2.0}.get(size, level) * noise(size, seed, 0.01))
    fail(folder, failed)
    first, *more = reading.of_folder(found.folder).summary
    assert said in first
    assert ("failed on 1 of 4 seeds" in " ".join(more)) == (failed == "t0004")


# ------------------------------------------------------------------------------------------------------ files, command
def test_the_export_is_the_confirmed_winner_not_the_luckiest(tmp_path):
    """256 was best in the search; on new seeds 64 is."""
    found = searched(tmp_path, lambda size, seed: {64: 1.2, 256: 1.1}.get(size, 2.0))
    assert evidence.choose(found, None).config["loader.batch_size"] == 256
    told = confirmed(found, lambda size, seed: {64: 1.2}.get(size, 2.0) * noise(size, seed))
    assert told.winner.changed == {"loader.batch_size": 64}
    chosen = evidence.choose(found, None)
    assert chosen.config["loader.batch_size"] == 64
    assert any("is better than the baseline" in line for line in export.provenance(found, chosen, tmp_path / "b.yaml"))
    assert evidence.choose(found, "t0001").name == "t0001"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"confirm": 3}, "confirm: 3 is not allowed; allowed: `key: value` lines"),
        ({"confirm": {"of": 0}}, "confirm: of: 0 is not allowed; allowed: "),
        ({"confirm": {"seeds": 1}}, "confirm: seeds: 1 is not allowed; allowed: "),
        ({"confirm": {"top": 3}}, "confirm: top: no such key; allowed: of, seeds, final, parallel"),
        ({"confirm": {"final": {"loader.workers": 2}}}, "final: loader.workers: is not allowed; allowed: evaluation"),
        ({"confirm": {"final": {"evaluation.extractor": "inception"}}}, "evaluation.extractor: is not allowed"),
        ({"confirm": {"final": {"evaluation.images": 2}}}, "evaluation.images: 2 is not allowed"),
        ({"confirm": {}, "seeds": 3}, "confirm: belongs to searches of one seed"),
        (
            {"confirm": {"final": {"evaluation.images": 100}}, "objective": "samples_per_s"},
            "samples_per_s is no judgement",
        ),
    ],
)
def test_mistakes_are_refused(changes, message):
    with pytest.raises(ConfigError, match="night.yaml") as refused:
        search_space.parse(FILE | changes, "night.yaml")
    assert message in str(refused.value)
