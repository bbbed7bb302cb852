"""What an earlier search teaches, and whose values are reused."""

import contextlib
import dataclasses
import json
import re
import shutil
import types

import optuna
import pytest

from tests.helpers import KilledError
from tests.tuning.asked import BIG, EARLIER, FILE, AskedBackend, end, pool, study
from tunediff import search, search_space
from tunediff.api import search_setup
from tunediff.api.search_setup import SearchOptions
from tunediff.config import ConfigError
from tunediff.core import machine_options
from tunediff.core.journal import Journal
from tunediff.report import plan, plan_words
from tunediff.tuning import experiment, warm_start

MEMORY = optuna.storages.InMemoryStorage


def finished(folder, *values, trials=4, **changes):
    """A search whose trials end one after the other with these values; None: not finite."""
    from tunediff.ray_backend.searcher import Searcher
    from tunediff.tuning.optuna_proposer import OptunaProposer

    content = FILE | EARLIER | {"budget": {"per_trial": "3s", "trials": trials}} | changes
    wanted = search_space.parse(content, "x.yaml")
    experiment.create(folder, wanted, content)
    searcher = Searcher(OptunaProposer(wanted, folder, storage=MEMORY()), AskedBackend(pool()))
    for value in values:
        suggestion = searcher.suggest("a")
        end(searcher, suggestion, "a", status="nan" if value is None else "ok", value=value)
    return folder


@pytest.fixture
def earlier(tmp_path):
    """A finished search: baseline 5, batch 64 best with 3, batch 32 not finite, another learning rate 4."""
    return finished(tmp_path / "earlier", 5.0, 3.0, None, 4.0)


def test_a_search_starts_from_what_an_earlier_one_measured(make, earlier):
    searcher = make(**EARLIER, warm_start=str(earlier), budget={"per_trial": "3s", "trials": 6})
    known = [t for t in study(searcher) if t.state.is_finished()]
    assert [(t.user_attrs["from"], t.value) for t in known] == [
        ("earlier/t0001", 3.0), ("earlier/t0003", 4.0), ("earlier/t0002", 8.0),
    ]  # fmt: skip
    first = searcher.suggest("a")
    assert first["loader.batch_size"] == 128  # the baseline is measured anew
    end(searcher, first, "a")
    second = searcher.suggest("b")
    assert second["trial"] == "t0001"
    assert (second["loader.batch_size"], second["optimizer.lr"]) not in [(64, 1e-3), (32, 1e-3), (128, 5e-3)]
    assert len(study(make(**EARLIER, warm_start=str(earlier)))) == len(study(searcher))  # resumed: not added twice


def assert_best_first(searcher):
    """No result of the earlier search counts, and its best points are drawn."""
    assert not any(t.state.is_finished() for t in study(searcher))
    drawn = []
    for name in ("a", "b", "c"):
        drawn.append(searcher.suggest(name))
        end(searcher, drawn[-1], name)
    assert [(d["loader.batch_size"], d["optimizer.lr"]) for d in drawn] == [(128, 1e-3), (64, 1e-3), (128, 5e-3)]


def test_with_another_budget_the_best_are_tried_first(make, earlier):
    content = EARLIER | {"first": None}
    searcher = make(**content, warm_start=str(earlier), budget={"per_trial": "9s", "trials": 6})
    assert_best_first(searcher)


def test_what_lies_outside_the_space_is_left_out(make, earlier):
    searcher = make(
        search={"loader.batch_size": [128, 256], "optimizer.lr": {"low": 1e-4, "high": 1e-2}}, first=None,
        warm_start=str(earlier),
    )  # fmt: skip
    assert [t.user_attrs["from"] for t in study(searcher) if t.state.is_finished()] == ["earlier/t0003"]


ELSEWHERE = [
    ({"cpu": "Loongson-3A7000"}, "CPU .+ there, Loongson-3A7000 here"),
    ({"cpu_features": ["neon"]}, "instruction sets .* there, neon here"),  # of one name, but without AMX or bfloat16
    ({"usable_cores": 96}, "CPU cores .+ there, 96 here"),
    ({"versions": {"torch": "1.0"}}, "torch .+ there, 1.0 here"),
    ({"code": "0123456789ab"}, "tunediff's code .+ there, 0123456789ab here"),
]


@pytest.mark.parametrize(("facts", "why"), ELSEWHERE)
def test_values_of_other_hardware_or_software_are_suggestions(make, earlier, environment_is, facts, why):
    """Neither results nor failures are reused; the best points are tried first."""
    environment_is(**facts)
    searcher = make(**EARLIER | {"first": None}, warm_start=str(earlier))
    assert_best_first(searcher)
    line = warm_start.describe(searcher.proposer.space, "cpu")
    assert re.fullmatch(rf"warm start: none of the 4 results of earlier is reused \({why}\); its best .+", line)


def test_values_measured_on_a_cpu_say_nothing_of_a_gpu(make, earlier):
    searcher = make(**EARLIER | {"first": None}, warm_start=str(earlier), device="cuda")
    assert not any(t.state.is_finished() for t in study(searcher))
    assert "(trained on a CPU there, a GPU here" in warm_start.describe(searcher.proposer.space, "cuda")


def test_a_start_says_how_much_is_believed(make, earlier):
    """Or why nothing is."""
    same = make(**EARLIER, warm_start=str(earlier)).proposer.space
    assert warm_start.describe(same, "cpu") == "warm start: 4 of 4 results of earlier are reused"
    content = {key: value for key, value in (FILE | EARLIER).items() if key != "budget"}
    other = search_space.parse(
        {**content, "budget": {"per_trial": "9s", "trials": 6}, "warm_start": str(earlier)}, "x.yaml"
    )
    assert "(budget 3 s there, 9 s here); its best are tried first" in warm_start.describe(other, "cpu")
    crowded = dataclasses.replace(same, trials_per_gpu=2)
    assert "(trials per GPU: 1 there, 2 here); its best are tried first" in warm_start.describe(crowded, "cpu")
    assert (
        warm_start.describe(
            search_space.parse({**content, "budget": {"per_trial": "9s", "trials": 6}}, "x.yaml"), "cpu"
        )
        == ""
    )


def test_dry_run_says_how_much_a_warm_start_reuses(make, earlier, tmp_path):
    planned = plan.values(make(**EARLIER, warm_start=str(earlier)).proposer.space, tmp_path, {})
    assert "warm start: 4 of 4 results of earlier are reused" in plan_words.lines(planned)


def test_dry_run_on_a_cluster_says_nothing_of_this_machine_about_a_warm_start(make, earlier, tmp_path):
    request = search_setup.SearchRequest(tmp_path, make(**EARLIER, warm_start=str(earlier)).proposer.space)
    planned = search_setup.planned(request, SearchOptions(address="head:6379"))
    assert not any("warm start" in line for line in plan_words.lines(planned))


def test_a_search_goes_on_where_the_earlier_one_is_gone(make, earlier, tmp_path):
    file = tmp_path / "night.yaml"
    file.write_text(json.dumps(FILE | {"warm_start": earlier.name}))
    with pytest.raises(ConfigError, match=f"{file}: warm_start: {earlier.name}: no such search in "):
        search_setup.prepare(SearchOptions(words=(str(file),), storage=tmp_path / "elsewhere"))
    request = search_setup.prepare(SearchOptions(words=(str(file),), name="new", storage=earlier.parent))
    assert request.space.warm_start == str(earlier)
    experiment.create(request.folder, request.space, request.content)
    shutil.rmtree(earlier)
    resumed = search_setup.prepare(SearchOptions(resume="new", storage=earlier.parent, trials=20))
    assert resumed.space.budget.trials == 20


def test_a_search_resumed_elsewhere_is_warned_of(earlier, environment_is, this_machine, capsys):
    this_machine(2)
    assert experiment.foreign(earlier) == ""
    environment_is(versions={"torch": "1.0"})
    assert search.main(["--resume", earlier.name, "--storage", str(earlier.parent), "--dry-run"]) == 0
    said = capsys.readouterr().err
    assert said.startswith("WARNING: earlier: 3 of its 3 trials were measured elsewhere (torch ")
    assert "1.0 here): what is measured from now on cannot be compared with them" in said


NODE = {"cpu": "AMD EPYC 9654", "cpu_features": ["avx512f"], "usable_cores": 64, "code": "0123456789ab"}
NODE |= {"gpus": ["NVIDIA H100 80GB HBM3, 700.00 W, 81559 MiB"], "versions": {"torch": "2.15.0"}}


def moved(folder, **environment):
    """The trials of this search were trained on another machine."""
    for path in folder.glob("trials/*"):
        Journal(path).write("worker", device="NVIDIA H100 80GB HBM3", threads=8, environment=environment)


def test_a_cluster_is_compared_by_its_nodes_not_by_its_head(make, earlier):
    """The head has no GPU: a warm start on the same nodes reuses all, and `--resume` there warns of nothing."""
    moved(earlier, **NODE)
    same = make(**EARLIER, warm_start=str(earlier), device="cuda", here=NODE)
    assert [t.user_attrs["from"] for t in study(same) if "from" in t.user_attrs][:2] == [
        "earlier/t0001",
        "earlier/t0003",
    ]
    space = same.proposer.space
    assert warm_start.describe(space, "cuda", NODE) == "warm start: 4 of 4 results of earlier are reused"
    for other, why in (
        (NODE | {"usable_cores": 32}, "CPU cores 64 there, 32 here"),
        ({}, "CPU AMD EPYC 9654 there, unknown here"),
    ):
        assert f"none of the 4 results of earlier is reused ({why}" in warm_start.describe(space, "cuda", other)
    slots = [types.SimpleNamespace(device="cuda", environment=NODE | changes) for changes in ({}, {"usable_cores": 32})]
    assert experiment.foreign(earlier, slots[0]) == ""
    assert "3 of its 3 trials were measured elsewhere (CPU cores 64 there, 32 here)" in experiment.foreign(
        earlier, slots[1]
    )
    assert experiment.foreign(earlier, types.SimpleNamespace(device="cuda", environment={})) == "", "no node yet"


def test_a_search_resumed_on_a_cluster_is_not_compared_with_its_head(earlier, monkeypatch, caplog):
    moved(earlier, **NODE)
    monkeypatch.setattr(machine_options, "_speaks_http2", lambda *_: True)
    search_setup.prepare(SearchOptions(resume="earlier", storage=earlier.parent, address="head:6379", dry_run=True))
    assert "measured elsewhere" not in caplog.text
    search_setup.prepare(SearchOptions(resume="earlier", storage=earlier.parent, dry_run=True))
    assert "measured elsewhere" in caplog.text


def test_a_failure_that_is_believed_teaches_after_a_resume_too(make, tmp_path):
    """What needs at least as much memory as a trial of the earlier search that ran out is not run."""
    from tunediff.ray_backend.searcher import Searcher
    from tunediff.tuning.optuna_proposer import OptunaProposer

    folder, content = tmp_path / "earlier", {**FILE, **BIG, "budget": {"per_trial": "3s", "trials": 2}}
    wanted = search_space.parse(content, "x.yaml")
    experiment.create(folder, wanted, content)
    searcher = Searcher(OptunaProposer(wanted, folder, storage=MEMORY()), AskedBackend(pool()))
    for status in ("ok", "oom"):
        end(searcher, searcher.suggest("a"), "a", status=status)
    changes = {**BIG, "first": None, "warm_start": str(folder), "budget": {"per_trial": "3s", "trials": 50}}
    make(**changes)
    again = make(**changes)
    run = []
    while (suggestion := again.suggest("b")) != "FINISHED":
        run.append((suggestion["loader.batch_size"], suggestion["precision.amp"]))
        end(again, suggestion, "b")
    assert run
    assert (1024, "none") not in run


def test_a_suggestion_that_turned_out_to_be_known_does_not_break_a_resume(make, earlier):
    """Tried first, yet the file had listed it already."""
    changes = EARLIER | {"warm_start": str(earlier), "budget": {"per_trial": "9s", "trials": 20}}
    searcher = make(**changes)
    for i in range(6):
        end(searcher, searcher.suggest(f"a{i}"), f"a{i}")
    assert [t for t in study(searcher) if "from" in t.user_attrs and "same_as" in t.user_attrs]
    assert make(**changes).suggest("b")["trial"] == "t0006"


@pytest.mark.parametrize("believed", [True, False])
@pytest.mark.parametrize("call", range(6))
def test_kill_at_any_step_of_the_start_keeps_the_warm_start(make, earlier, monkeypatch, call, believed):
    """A search that is killed before or while it learns from the earlier one learns the rest when it is resumed."""
    budget = {"per_trial": "3s" if believed else "9s", "trials": 6}
    changes = EARLIER | {"first": None, "warm_start": str(earlier), "budget": budget}
    calls, left = [], call

    def dying(method):
        def call_it(study, *args, **how):
            if len(calls) == left:
                raise KilledError
            calls.append(method)
            return method(study, *args, **how)

        return call_it

    with monkeypatch.context() as patch:
        for name in ("add_trial", "enqueue_trial"):
            patch.setattr(optuna.Study, name, dying(getattr(optuna.Study, name)))
        with contextlib.suppress(KilledError):
            make(**changes)
    again = study(make(**changes))
    learned = [t.user_attrs["from"] for t in again if "from" in t.user_attrs]
    expected = ["earlier/t0001", "earlier/t0003"] + ["earlier/t0002"] * believed
    assert learned == expected
    assert [t.user_attrs["from"] for t in study(make(**changes)) if "from" in t.user_attrs] == expected


def test_lost_study_learns_the_warm_start_again(make, earlier, tmp_path):
    changes = EARLIER | {"first": None, "warm_start": str(earlier)}
    searcher = make(in_file=True, **changes)
    end(searcher, searcher.suggest("a"), "a")
    (tmp_path / "study.db").unlink()
    learned = [t.user_attrs["from"] for t in study(make(in_file=True, **changes)) if "from" in t.user_attrs]
    assert learned == ["earlier/t0001", "earlier/t0003", "earlier/t0002"]
