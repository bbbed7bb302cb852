"""What a search tells every driver."""

from tests.search_space.files import parse
from tunediff.tuning.messages import Plan


def test_what_measures_reaches_every_driver(tmp_path):
    loaded = parse(fresh=True, operations=7)
    plan = Plan.of(loaded, tmp_path, "slot-")
    assert (loaded.fresh, loaded.operations, plan.fresh, plan.profile_steps) == (True, 7, True, 7)
    plan = Plan.of(parse(), tmp_path, "slot-")
    assert (plan.fresh, plan.profile_steps) == (False, 0)
