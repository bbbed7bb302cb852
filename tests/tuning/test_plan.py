"""What a search tells every driver."""

from tests.space.files import parse
from tunediff.tuning.trial import plan


def test_what_measures_reaches_every_driver(tmp_path):
    loaded = parse(fresh=True, operations=7)
    job = plan(loaded, tmp_path, ["slot"])
    assert (loaded.fresh, loaded.operations, job["fresh"], job["profile_steps"]) == (True, 7, True, 7)
    job = plan(parse(), tmp_path, ["slot"])
    assert (job["fresh"], job["profile_steps"]) == (False, 0)
