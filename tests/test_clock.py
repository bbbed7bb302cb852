"""The clock pays every second to one part and stands still for the budget outside training."""

import pytest

from tunediff.core.clock import PARTS, Budget, Clock


class Time:
    """A clock moved by hand."""

    def __init__(self):
        self.s = 100.0
        self.synchronized = 0

    def __call__(self):
        return self.s

    def synchronize(self):
        self.synchronized += 1


@pytest.fixture
def time():
    return Time()


def clock(time, **budget):
    return Clock(Budget(**({"seconds": 10.0} | budget)), time.synchronize, time)


def test_only_training_is_charged(time):
    c = clock(time)
    for name, seconds in [("setup", 7), ("train", 2), ("evaluation", 5), ("checkpoint", 3)]:
        with c.part(name):
            time.s += seconds
    time.s += 1000  # outside of any part
    assert c.train_s == 2
    assert c.seconds == {"setup": 7, "compile": 0, "data_wait": 0, "train": 2, "evaluation": 5, "checkpoint": 3}


@pytest.mark.parametrize(("charged", "train_s"), [(True, 9), (False, 2)])
def test_setup_of_the_workload_is_charged_or_free(time, charged, train_s):
    c = clock(time, setup_charged=charged)
    with c.part("setup"):
        time.s += 7
        c.before_first_batch_s = 7
        time.s += 5  # of the engine
    with c.part("train"):
        time.s += 2
    assert c.train_s == train_s


def test_parts_nest_and_the_inner_one_is_paid(time):
    c = clock(time)
    with c.part("train"):
        time.s += 1
        with c.part("data_wait", synchronize=False):
            time.s += 2
        time.s += 4
        with c.part("checkpoint"):
            time.s += 8
    assert (c.seconds["train"], c.seconds["data_wait"], c.seconds["checkpoint"]) == (5, 2, 8)
    assert c.train_s == 7


def test_edges_wait_for_the_device(time):
    c = clock(time)
    with c.part("train"):
        pass
    assert time.synchronized == 2
    with c.part("data_wait", synchronize=False):
        c.read(synchronize=False)
    assert time.synchronized == 2
    c.read()
    assert time.synchronized == 3, "by then the device has finished its steps"


def test_a_part_that_fails_is_paid(time):
    c = clock(time)
    with pytest.raises(RuntimeError), c.part("train"):
        time.s += 3
        raise RuntimeError
    assert c.train_s == 3


def test_progress_is_the_largest_share_and_at_most_one(time):
    c = clock(time, samples=1000)
    assert c.progress(5.0, 100) == 0.5
    assert c.progress(1.0, 900) == 0.9
    assert c.progress(20.0, 0) == 1.0


def test_state_goes_on_and_compiling_again_is_not_charged(time):
    first = clock(time)
    with first.part("compile"):
        time.s += 4
    with first.part("train"):
        time.s += 3
    second = clock(time)
    with second.part("compile"):  # the restarted process compiles once more
        time.s += 5
    second.load_state_dict(first.state_dict())
    assert second.train_s == first.train_s == 7
    assert second.seconds["setup"] == 5


@pytest.mark.parametrize("budget", [{}, {"seconds": 0.0}, {"seconds": -1.0}, {"samples": 0}, {"seconds": float("nan")}])
def test_empty_budgets_are_refused(budget):
    with pytest.raises(ValueError, match="budget"):
        Budget(**budget)


def test_unknown_part(time):
    with pytest.raises(ValueError, match="not a part of the clock"), clock(time).part("training"):
        pass
    assert "training" not in PARTS


def test_who_hears_of_parts_hears_of_the_one_that_goes_on(time):
    """A checkpoint in the middle of a training is not all that is told of the rest; telling is paid by no part."""
    heard = []

    def told(part):
        time.s += 100
        heard.append(part)

    c = Clock(Budget(10.0), time.synchronize, time, told)
    with c.part("train"):
        time.s += 1
        with c.part("checkpoint"):
            time.s += 2
        time.s += 4
    assert heard == ["train", "checkpoint", "train"]
    assert (c.seconds["train"], c.seconds["checkpoint"]) == (5, 2)
