"""Rounds of configurations without a cluster: who runs when, and when it ends."""

import functools

import pytest

from tests.helpers import point
from tests.tuning.asked import AskedBackend, pool
from tunediff import config as cfg
from tunediff.core import trial_record as record
from tunediff.core.errors import Failure
from tunediff.core.journal import Journal, repeat_lost
from tunediff.core.listeners import Listener, Listeners
from tunediff.core.trial_record import End
from tunediff.report import sentences
from tunediff.search_space import SearchBudget
from tunediff.tuning import rounds
from tunediff.tuning.trial_spec import TrialSpec


@pytest.fixture
def run(tmp_path):
    """Run rounds of so many configurations; (trials in the order in which they ran, what the listener heard)."""

    def run(rivals=2, most=3, ends=None, over=lambda: False, loses=()):
        ran, heard = [], []

        def events_of(spec):
            name, begun = spec.name, record.read_begun(spec.folder)
            assert (spec.slot, spec.group.place.nodes) == (0, ("id0",))
            ran.append((name, begun.seed, begun.drawn["side"]))
            if (end := (ends or {}).get(name, End("ok"))) is OSError:
                raise OSError("no space left")
            journal, measured = Journal(spec.folder), point(1, frechet=2.0)
            journal.point(measured)
            yield measured
            if name in loses and [one for one, *_ in ran].count(name) == 1:
                yield Failure("its node died")
            journal.end(end)
            yield end

        config = cfg.override(cfg.baseline("digits"), {"seed": 1000})
        configs = [cfg.override(config, {"loader.batch_size": 32 * 2**place}) for place in range(rivals)]
        candidates = [(one, {"side": "ABC"[place]}) for place, one in enumerate(configs)]
        make = functools.partial(TrialSpec.of, tmp_path, budget=SearchBudget(20.0, 9), metric="frechet", mode="min")

        class Recorder(Listener):
            def start(self, trial, content):
                heard.append(("start", trial, content["seed"]))

            def point(self, trial, content):
                heard.append(("point", trial, 0))

            def end(self, trial, content):
                heard.append(("end", trial, content["seed"]))

        hub = Listeners()
        with hub.with_listeners(Recorder()):
            rounds.run(tmp_path, rounds.Rounds(candidates, most, make, over), AskedBackend(pool(), events_of), hub)
        return ran, heard

    return run


def test_every_other_round_runs_backwards_and_each_has_its_seed(run):
    ran, heard = run(rivals=3, most=2)
    assert ran == [
        ("t0000", 1000, "A"), ("t0001", 1000, "B"), ("t0002", 1000, "C"),
        ("t0005", 1001, "C"), ("t0004", 1001, "B"), ("t0003", 1001, "A"),
    ]  # fmt: skip
    assert heard[:3] == [("start", "t0000", 1000), ("point", "t0000", 0), ("end", "t0000", 1000)]


@pytest.fixture
def waves(tmp_path):
    """Run rounds of so many configurations on so many devices; returns {name: device} of each wave."""

    def waves(rivals, at_once, most, fails=(), breaks_after=None):
        config = cfg.override(cfg.baseline("digits"), {"seed": 1000})
        candidates = [(config, {"side": str(place)}) for place in range(rivals)]
        make = functools.partial(TrialSpec.of, tmp_path, budget=SearchBudget(20.0, 9), metric="frechet", mode="min")
        proposer = rounds.Rounds(candidates, most, make, lambda: False, at_once)
        found = []
        while wave := list(iter(proposer.ask, None)):
            found.append({spec.name: spec.run_device for spec in wave})
            for spec in wave:
                if breaks_after is not None and spec.name > breaks_after:
                    return found  # the others run
                Journal(spec.folder).end(End("oom" if spec.name in fails else "ok"))
                proposer.tell(spec, record.read_trial(spec.folder))
        return found

    return waves


def test_pairs_on_several_devices_swap_from_wave_to_wave(waves):
    """Eight devices have four pairs at a time, of which neither side has all even devices; in the next wave each side
    has the other's device."""
    first, second = waves(2, 8, 8)
    assert [first[f"t{number:04d}"] for number in range(8)] == [0, 1, 3, 2, 4, 5, 7, 6]
    assert [second[f"t{number:04d}"] for number in range(8, 16)] == [1, 0, 2, 3, 5, 4, 6, 7]


@pytest.mark.parametrize(("rivals", "at_once"), [(2, 2), (3, 3), (3, 2), (4, 2), (3, 8), (5, 4), (4, 4)])
def test_every_device_is_used_and_every_configuration_has_each_as_often(waves, rivals, at_once):
    most, groups = 12, max(1, at_once // rivals)
    found = waves(rivals, at_once, most)
    used = {}
    for wave in found:
        assert len(set(wave.values())) == len(wave), "a device has one run at a time"
        assert len(wave) == (at_once if at_once < rivals else groups * rivals), "every run has neighbours"
        for name, device in wave.items():
            number, candidate = divmod(int(name[1:]), rivals)
            group = number % groups
            assert at_once < rivals or device // rivals == group, "a round stays on the devices of its group"
            used.setdefault((candidate, group), []).append(device)
    for (_, group), devices in used.items():
        allowed = range(at_once) if at_once < rivals else range(group * rivals, (group + 1) * rivals)
        counts = [devices.count(device) for device in allowed]
        assert max(counts) - min(counts) <= 1


def test_neighbours_change_where_a_round_has_more_runs_than_devices(waves):
    """With two devices each of baseline and finalists is beside each other one as often, and none has no neighbour."""
    found = [sorted(int(name[1:]) % 3 for name in wave) for wave in waves(3, 2, 12)]
    assert [found.count(list(pair)) for pair in ((0, 1), (0, 2), (1, 2))] == [6, 6, 6]


def test_runs_that_are_left_close_ranks_where_a_round_has_too_few_devices(waves):
    found = [list(wave) for wave in waves(3, 2, 4, fails=["t0001"])]
    assert found == [["t0000", "t0001"], ["t0002"], ["t0003", "t0005"], ["t0008", "t0006"], ["t0011", "t0009"]]


def test_a_wave_that_was_interrupted_begins_again_as_a_wave(waves, tmp_path):
    assert waves(3, 2, 2, breaks_after="t0002") == [{"t0000": 0, "t0001": 1}, {"t0002": 0, "t0003": 1}]
    assert waves(3, 2, 2) == [{"t0002": 0, "t0003": 1}, {"t0004": 0, "t0005": 1}]
    events = {one.name: [event["event"] for event in record.events(tmp_path / "trials" / one.name)]
              for one in record.read_trials(tmp_path)}  # fmt: skip
    assert events["t0002"] == ["start", "end", "restarted", "start", "end"]
    assert events["t0003"] == ["start", "restarted", "start", "end"], "it had begun with its neighbour"
    assert "restarted" not in events["t0000"] + events["t0001"]


def test_journals_say_what_ran(run, tmp_path):
    run(most=2)
    known = {one.name: one for one in record.read_trials(tmp_path)}
    assert [known[name].number for name in sorted(known)] == [0, 1, 2, 3]
    assert (known["t0003"].drawn, known["t0003"].config["seed"]) == ({"side": "B", "seed": 1001}, 1001)


def test_what_is_finished_does_not_run_again(run):
    run(most=1)
    ran, heard = run(most=2)
    assert [name for name, *_ in ran] == ["t0003", "t0002"]
    assert not any(name in ("t0000", "t0001") for _, name, _ in heard)


def test_a_rival_that_fails_is_out_and_stays_out(run):
    ran, _ = run(rivals=3, most=3, ends={"t0001": End("oom", "too large")})
    assert [name for name, *_ in ran] == ["t0000", "t0001", "t0002", "t0005", "t0003", "t0006", "t0008"]
    assert run(rivals=3, most=4)[0] == [("t0011", 1003, "C"), ("t0009", 1003, "A")]  # it failed before the kill


def test_run_whose_workers_died_runs_again_on_resume(run, tmp_path):
    died = End("error", "the workers died 2 times: killed", process_died=True)
    assert [name for name, *_ in run(rivals=3, most=2, ends={"t0001": died})[0]] == [
        "t0000",
        "t0001",
        "t0002",
        "t0005",
        "t0003",
    ]
    repeat_lost(tmp_path)
    ran, _ = run(rivals=3, most=2, loses=["t0001"])  # and loses its node then
    assert [name for name, *_ in ran] == ["t0001", "t0001", "t0004"]
    again = record.read_trial(tmp_path / "trials" / "t0001")
    assert (again.status, sentences.of_trial(again)) == ("ok", f"started from the beginning: {died.reason}")


@pytest.mark.parametrize(
    ("rivals", "failing", "names"),
    [
        (3, "t0000", ["t0000"]),  # nothing to compare with
        (2, "t0001", ["t0000", "t0001"]),  # nobody to compare
        (2, "t0002", ["t0000", "t0001", "t0003", "t0002"]),
        (2, "t0003", ["t0000", "t0001", "t0003"]),
    ],
)
def test_no_run_starts_after_the_baseline_or_the_last_rival_has_failed(run, rivals, failing, names):
    assert [name for name, *_ in run(rivals=rivals, ends={failing: End("nan")})[0]] == names


def test_it_is_asked_before_every_round(run):
    answers = [False, False, True]
    assert len(run(most=9, over=lambda: answers.pop(0))[0]) == 4
    assert answers == []
    assert run(most=9, over=lambda: True)[0] == []


def test_a_run_whose_node_was_lost_runs_again(run, tmp_path, monkeypatch):
    ran, heard = run(most=1, loses={"t0001"})
    assert [event for event, name, _ in heard if name == "t0001"] == ["start", "point", "point", "end"]
    assert [name for name, *_ in ran] == ["t0000", "t0001", "t0001"]
    assert [one.status for one in record.read_trials(tmp_path)] == ["ok", "ok"]
