"""A searcher asked and told as Ray Tune does, without a cluster."""

from tests.helpers import point
from tunediff.core.journal import Journal
from tunediff.core.trial_record import End, read_begun
from tunediff.tuning.backend import Backend
from tunediff.tuning.resources import Machine, Pool, ResourcePartition
from tunediff.tuning.trial import run_trial_on_slot

FILE = {
    "workload": "digits",
    "budget": {"per_trial": "3s", "trials": 6},
    "search": {"loader.batch_size": [32, 64, 128], "loader.resident": [False, True]},
    "first": [{"loader.batch_size": 64}],
    "noise": 1,
}


EARLIER = {
    "search": {"loader.batch_size": [32, 64, 128], "optimizer.lr": {"low": 1e-4, "high": 1e-2, "log": True}},
    "first": [{"loader.batch_size": 64}, {"loader.batch_size": 32}, {"optimizer.lr": 5e-3}],
}


BIG = {
    "search": {"loader.batch_size": [64, 1024], "precision.amp": ["none", "bf16"], "optimizer.lr": [1e-4, 1e-3]},
    "first": [{"loader.batch_size": 1024}],
    "fixed": {"loader.resident": True},
    "baseline": {"loader.batch_size": 64},
}  # fmt: skip


def end(searcher, suggestion, trial_id, status="ok", value=5.0, refusal="", **values):
    """Write the journal of a trial as its driver and workers do, then complete it as Tune does."""
    spec = suggestion["spec"]
    journal = Journal(spec.folder)
    journal.write("worker", device="cpu", threads=2)
    if refusal:
        journal.write("decision", rule="capture", outcome="refused", reason=refusal)
    if status == "ok":
        for index in range(1, 5):
            journal.point(point(index, index * 1.0, frechet=value, **values))
    if status is not None:
        journal.end(End(status, "why"))
    if trial_id is not None:
        searcher.on_trial_complete(trial_id, {})


def drawn_of(suggestion):
    """What was drawn of a trial that Tune was given."""
    return read_begun(suggestion["spec"].folder).drawn


def study(searcher):
    return searcher.proposer.study.optuna.trials


def pool(slots=1, sizes=(1,), **how):
    """One for so many trials at once, each on a machine of its own."""
    machines = tuple(Machine(64, 0, f"m{index}", f"id{index}") for index in range(slots))
    return Pool(ResourcePartition(machines, sizes, False, True), **how)


class AskedBackend(Backend):
    """A backend, and its slots, that trains nothing: `events_of(spec)` yields what a job reports."""

    def __init__(self, devices, events_of=None):
        self.devices, self.events_of = devices, events_of
        self.shown, self.released, self.lost = [], [], []

    def run(self, spec, check):
        return run_trial_on_slot(spec, self, check)

    def release(self, spec):
        self.released.append(spec.name)

    def show(self, slot, line):
        self.shown.append(line)

    # ---- as a slot
    def start(self, job):
        self.events, self.lost = self.events_of(job), job.group.place.nodes
        return job.attempt

    def event(self, serial, cursor):
        return next(self.events)

    def go_on(self, serial, index):
        pass

    def gone(self, nodes):
        return self.lost
