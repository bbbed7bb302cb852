"""Batches that are made while the clock stands still are charged when they are used, whoever makes them."""

import collections
import contextlib

import pytest

from tests.helpers import Hands, timed, toy, train
from tests.toy.train import INPUTS, TARGETS, begin, loss_of
from tunediff.core.clock import Budget, Clock
from tunediff.training import state
from tunediff.training.prefetched import Prefetched


class Loader:
    """`processes`, each of which makes a batch in `batch_s`, have `room` batches ready or in hand, and give them in order.

    `held`: they begin no batch at the closed gate, which this is as well, and note their work while the clock stands
    still. The others are what the gate does not know.
    """

    position, only_in_process = None, False

    def __init__(self, hands, processes=1, batch_s=0.25, room=8, held=False):
        self.hands, self.many, self.batch_s, self.held = hands, processes, batch_s, held
        self.processes = processes if held else 0
        self.seen_s, self.noted_s, self.still, self.closed = hands.s, 0.0, True, False
        self.left = collections.deque([batch_s, number % processes] for number in range(room))  # seconds, process
        self.number = room

    def work(self):
        """Let the time pass for all processes."""
        passed_s, self.seen_s = self.hands.s - self.seen_s, self.hands.s
        for process in range(self.many):
            rest_s = passed_s
            for batch in [batch for batch in self.left if batch[1] == process and batch[0] > 1e-9]:
                if self.held and self.closed and batch[0] == self.batch_s:
                    break
                spent_s = min(rest_s, batch[0])
                batch[0], rest_s = batch[0] - spent_s, rest_s - spent_s
                self.noted_s += spent_s / self.many if self.still else 0.0

    def fetch(self):
        self.work()
        assert not self.closed
        while self.left[0][0] > 1e-9:
            self.hands.s += self.left[0][0]
            self.work()
        self.left.popleft()
        self.left.append([self.batch_s, self.number % self.many])
        self.number += 1
        return INPUTS[:8], TARGETS[:8]

    def move(self, fetched):
        return fetched

    def close(self):
        """Close the gate; the feed's end as well."""
        self.work()
        self.still = self.closed = True

    def open(self):
        self.work()
        self.still = self.closed = False

    def over_loaders(self):
        return contextlib.nullcontext()

    @property
    def worked_s(self):
        return self.noted_s if self.held else None


class Phases(collections.Counter):
    of_device = False

    def add(self, name, seconds):
        self[name] += seconds


def trained(evaluation_s, step_s=0.001, budget_s=48.0, points=6, setup_s=3.0, **how):
    """Train until the budget is spent. Returns steps, batches ahead at each point, and the seconds charged for them."""
    hands = Hands()
    loader, clock, phases = Loader(hands, **how), timed(budget_s, hands), Phases()
    prefetched = Prefetched(clock, phases, loader)
    first, steps, facts = [prefetched.fetch(loader)], 0, []
    prefetched.hold()
    hands.s += setup_s
    for point in range(1, points + 1):
        with clock.part("train"), prefetched.at_work():
            while clock.read() < budget_s * point / points - 1e-9:
                with clock.part("data_wait"):
                    prefetched.fetch(loader if not first else type("Replay", (), {"fetch": first.pop}))
                hands.s, steps = hands.s + step_s, steps + 1
        facts.append(prefetched.facts())
        hands.s += evaluation_s
    charged_s = sum(fact["batches_ahead_s"] for fact in facts)
    assert phases["data_wait"] == pytest.approx(charged_s)
    running_s = hands.s - clock.seconds["train"] - clock.seconds["data_wait"] + charged_s
    assert running_s == pytest.approx(hands.s - sum(clock.seconds.values()) + charged_s), "it is waiting for data"
    return steps, [fact["batches_ahead"] for fact in facts], charged_s


KINDS = {
    "thread": {},
    "thread, a long queue": {"room": 32},
    "thread, half as fast as the step": {"step_s": 0.1},
    "threads": {"processes": 4, "batch_s": 1.0},
    "threads, a long queue": {"processes": 4, "batch_s": 1.0, "room": 32},
    "4 processes": {"processes": 4, "batch_s": 1.0, "held": True},
    "4 processes, prefetch 8": {"processes": 4, "batch_s": 1.0, "room": 32, "held": True},
    "8 processes": {"processes": 8, "batch_s": 2.0, "room": 16, "held": True},
    "8 processes, few batches": {"processes": 8, "batch_s": 1.0, "room": 16, "held": True, "budget_s": 12.0},
    "batches longer than the time between evaluations": {"processes": 4, "batch_s": 10.0, "held": True, "budget_s": 480.0, "points": 60},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_steps_do_not_depend_on_how_long_an_evaluation_takes(kind):
    """Nor on what was made before the first one: the loader makes a batch in a quarter of a second (2.5 s)."""
    how = KINDS[kind]
    steps, _, charged_s = trained(0.0, **how)
    per_batch_s = how.get("batch_s", 0.25) / how.get("processes", 1)
    assert steps == pytest.approx(how.get("budget_s", 48.0) / per_batch_s, rel=0.03)
    for evaluation_s in (0.4, 3.0, 9.0):
        again, _, more_s = trained(evaluation_s, **how)
        assert again == pytest.approx(steps, rel=0.03), evaluation_s
        assert more_s > charged_s


@pytest.mark.parametrize("how", [{}, {"room": 64}, {"processes": 4, "held": True}, {"processes": 4, "room": 32}])
@pytest.mark.parametrize("step_s", [0.26, 0.5, 2.0])
def test_a_loop_that_never_waits_for_its_loader_is_charged_nothing(how, step_s):
    batch_s = 0.25 * how.get("processes", 1)
    steps, ahead, charged_s = trained(9.0, step_s, batch_s=batch_s, **how)
    assert (sum(ahead), charged_s) == (0, 0.0)
    assert steps == pytest.approx(48.0 / step_s, abs=6)


# ------------------------------------------------------------------------------------------------------- in a training
def run(tmp_path, evaluation_s, room, held=False):
    hands = Hands()

    def judge():
        hands.s += evaluation_s
        return {"error": 1.0}

    def body(trial):
        net, optimizer = begin(trial)
        trial.evaluate_with(judge)
        loader = Loader(hands, batch_s=0.3, room=room, held=held)
        trial.engine.prefetched.gate = loader
        for batch in trial.engine.batches(lambda start, position: loader):
            hands.s += 0.005
            trial.step(loss_of(net, batch), optimizer)

    config = toy(evaluation__points=4)
    folder = tmp_path / f"{evaluation_s}-{room}-{held}"
    return train(config, seconds=60.0, clock=timed(60.0, hands), evaluates=True, folder=folder, body=body)


@pytest.mark.parametrize("held", [False, True])
def test_evaluations_and_queues_give_a_training_no_steps_for_nothing(tmp_path, held):
    without = run(tmp_path, 0.0, 2, held)
    assert without.steps == pytest.approx(200, rel=0.02)
    for room in (2, 64):
        outcome = run(tmp_path, 100.0, room, held)
        assert outcome.steps == pytest.approx(without.steps, rel=0.03)
        last = outcome.points[-1]
        assert last["batches_ahead"] > 0
        assert last["batches_ahead_s"] == pytest.approx(0.3 * last["batches_ahead"], rel=0.1)
        assert last["train_s"] == pytest.approx(60.0, abs=0.6)
        assert outcome.seconds["data_wait"] == pytest.approx(60.0 - 0.005 * outcome.steps, abs=0.7)


def test_loader_processes_wait_while_any_checkpoint_is_written(tmp_path, monkeypatch):
    """Also those between two evaluations, which stop the clock too."""
    hands, closed = Hands(), []
    loader = Loader(hands, room=64, held=True)
    monkeypatch.setattr(state, "save", lambda content, folder: closed.append(loader.closed))

    def body(trial):
        net, optimizer = begin(trial)
        trial.engine.prefetched.gate = loader
        for batch in trial.engine.batches(lambda start, position: loader):
            hands.s += 0.005
            trial.step(loss_of(net, batch), optimizer)

    config = toy(evaluation__points=2)
    train(config, seconds=60.0, clock=timed(60.0, hands), folder=tmp_path, checkpoint_every_s=10.0, body=body)
    assert len(closed) > config.evaluation.points
    assert all(closed)


# --------------------------------------------------------------------------------------------------------- on a device
def on_device(evaluation_s, step_s, **how):
    """Train on a device that works on while the host fetches; the clock is read every second step."""
    hands, free_s = Hands(), 0.0

    def synchronize():
        hands.s = max(hands.s, free_s)

    loader, phases = Loader(hands, **how), Phases()
    phases.of_device = True
    clock = Clock(Budget(48.0), synchronize, hands)
    prefetched, steps, charged_s = Prefetched(clock, phases, loader), 0, 0.0
    prefetched.fetch(loader)
    prefetched.hold()
    for point in range(1, 7):
        with clock.part("train"), prefetched.at_work():
            while clock.read() < 48.0 * point / 6:
                for _ in range(2):
                    prefetched.fetch(loader)
                    hands.s, steps = hands.s + 0.001, steps + 1
                    free_s = max(free_s, hands.s) + step_s
        charged_s += prefetched.facts()["batches_ahead_s"]
        hands.s += evaluation_s
    assert clock.seconds["data_wait"] == 0.0, "`Meter.read` moves there what the device waits"
    return steps, charged_s


@pytest.mark.parametrize("how", [{}, {"processes": 4, "batch_s": 1.0, "held": True}])
def test_a_device_that_works_while_the_host_waits_is_charged_what_it_would_have_waited(how):
    steps, _ = on_device(0.0, 0.1, **how)
    assert steps == pytest.approx(192, rel=0.03)
    assert on_device(9.0, 0.1, **how)[0] == pytest.approx(steps, rel=0.03)
    slow, charged_s = on_device(0.0, 0.5, **how)
    assert charged_s == 0.0
    assert on_device(9.0, 0.5, **how) == (slow, 0.0), "the device is what the loop waits for"
