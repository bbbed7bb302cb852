"""What draws new points sees of thousands of trials."""

import optuna
import pytest

from tunediff.tuning import sampling

SPACE = {"x": optuna.distributions.FloatDistribution(0, 1)}


def studied(values, sampler, directions=("minimize",)):
    """A study whose trials had these values, in order."""
    study = optuna.create_study(sampler=sampler, directions=directions)
    for number, value in enumerate(values):
        told = value if isinstance(value, tuple) else (value,)
        study.add_trial(optuna.create_trial(params={"x": (number % 97) / 97}, distributions=SPACE, values=told))
    return study


@pytest.fixture
def seen(monkeypatch):
    """The numbers of the trials that were looked at, of histories beyond 10 new and 2 good ones."""
    found, part = [], sampling._part

    def noted(*args):
        answer = part(*args)
        found.append([trial.number for trial in answer])
        return answer

    for name, replaced in (("HISTORY", 10), ("GOOD", 2), ("_part", noted)):
        monkeypatch.setattr(sampling, name, replaced)
    return found


def test_of_few_trials_it_draws_what_tpe_draws():
    values = [abs(number - 17) for number in range(40)]
    how = {"seed": 3, "multivariate": True, "group": True, "constant_liar": True, "n_startup_trials": 5}
    studies = studied(values, sampling.default_sampler(3)), studied(values, optuna.samplers.TPESampler(**how))
    ours, theirs = ([study.ask(SPACE).params for _ in range(3)] for study in studies)
    assert ours == theirs


def test_of_many_it_looks_at_the_newest_and_at_the_best_however_old(seen):
    study = studied([5.0, 1.0, 4.0, 0.5, *(10.0 + number for number in range(40))], sampling.default_sampler(3))
    study.ask(SPACE)
    assert [1, 3, *range(34, 44)] in seen
    assert all(numbers[:2] == [1, 3] and len(numbers) == 12 for numbers in seen), "the one that is drawn is the newest"


def test_of_two_objectives_the_best_of_each_stay(seen):
    values = [(1.0, 9.0), (9.0, 0.5), (8.0, 8.0), (2.0, 7.0), (9.0, 1.0), *[(20.0, 20.0)] * 20]
    studied(values, sampling.default_sampler(3), ("minimize", "minimize")).ask(SPACE)
    assert [0, 1, 3, 4, *range(15, 25)] in seen


def test_trials_that_were_stopped_early_are_not_among_the_best(seen):
    """What they had before their end is not what the others have at theirs."""
    study = optuna.create_study(sampler=sampling.default_sampler(3))
    for number in range(40):
        pruned = number == 2
        state = optuna.trial.TrialState.PRUNED if pruned else optuna.trial.TrialState.COMPLETE
        values = {"intermediate_values": {0: 0.1}, "value": 0.1} if pruned else {"value": float(number)}
        trial = optuna.create_trial(params={"x": 0.5}, distributions=SPACE, state=state, **values)
        study.add_trial(trial)
    study.ask(SPACE)
    assert [0, 1, *range(30, 40)] in seen


def test_what_runs_counts_among_the_newest(seen):
    """Else all slots would draw the same point."""
    study = studied([1.0] * 30, sampling.default_sampler(3))
    running = [study.ask(SPACE) for _ in range(3)]
    assert [trial.number for trial in running] == [30, 31, 32]
    assert {30, 31} <= set(seen[-1])
