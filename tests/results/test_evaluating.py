"""What judging costs, told before it is done."""

import time
from unittest import mock

import pytest
import torch

from tests import searches
from tests.helpers import CPU, shipped_toy, tiny, toy
from tunediff import config as cfg
from tunediff import results, space
from tunediff.data import images as data
from tunediff.results import evaluating
from tunediff.training import judging
from tunediff.workloads.diffusion.process import Diffusion
from tunediff.workloads.diffusion.sampling import generate
from tunediff.workloads.diffusion.validation import Validation

FULL = {"evaluation.images": 5000, "evaluation.sampler": "ddpm"}


@pytest.mark.parametrize("sampler", ["ddim", "ddpm"])
def test_the_work_of_a_diffusion_is_what_its_evaluation_asks_of_the_network(sampler):
    config = tiny(evaluation__sampler=sampler, evaluation__images=64, evaluation__validation_images=20,
                  evaluation__batch_size=32)  # fmt: skip
    seen, process = [], Diffusion(config.process)

    def predict(x, t):
        seen.append(len(x))
        return torch.zeros_like(x)

    for _ in generate(predict, process, config.evaluation, (1, 8, 8), 64, "cpu"):
        pass
    Validation(config.data, config.evaluation, data.load(config.data), CPU)(predict, process)
    assert evaluating.work(config) == pytest.approx(sum(seen), rel=0.1)  # its last batch is filled up
    assert evaluating.work(config, {"evaluation.images": 128}) > 1.4 * evaluating.work(config)


def test_the_work_of_a_classifier_are_its_held_out_images():
    assert evaluating.work(cfg.baseline("digits_classifier")) == 359  # a fifth of 1,797
    gone = cfg.override(cfg.baseline("images_classifier"), {"data.path": "/nowhere"}, check=False)
    assert evaluating.work(gone) is None


def test_a_final_evaluation_takes_what_an_evaluation_of_the_search_took_times_its_work(tmp_path):
    """Each trial was evaluated for 2 s in 2 points; 1,000 images × 20 steps and 256 × 10 bins become 5,000 × 1,000."""
    wanted = searches.make(folder := tmp_path / "night")
    searches.write(folder, wanted, 0)
    found = results.read(folder)
    expected = 1.0 * (5_000_000 + 2560) / (20_000 + 2560)
    assert evaluating.final_s(found.trials, FULL) == pytest.approx(expected)
    assert evaluating.allowance_s(found.trials, FULL) == pytest.approx(2 * expected)
    assert evaluating.allowance_s(found.trials, {}) == 0.0
    searches.write(folder, wanted, 1, {"loader.batch_size": 32}, curve=((20.0, 4000, 2.0),))  # 2 s for one point
    assert evaluating.final_s(results.read(folder).trials, FULL) == pytest.approx(2 * expected)
    assert evaluating.final_s([], FULL) is None


def test_what_a_search_will_spend_on_judging():
    content = searches.FILE | {"confirm": {"of": 2, "seeds": 4, "final": FULL}}
    told = evaluating.cost(space.parse(content, "night.yaml"), 0.001)
    assert (told.evaluation_s, told.evaluations) == (pytest.approx(22.56), 8 * 4)
    assert told.finals == (("confirming run", 12, pytest.approx(5002.56)),)
    unknown = evaluating.cost(space.parse(content, "night.yaml"), None)
    assert (unknown.evaluation_s, unknown.finals) == (None, (("confirming run", 12, None),))


def test_the_rate_of_a_network_is_measured():
    with shipped_toy():
        config = toy()
        assert judging.pass_s(config, CPU) is None
        assert evaluating.work(config) is None
        slow = mock.Mock(side_effect=lambda count: time.sleep(0.002 * count))
        with mock.patch.object(cfg.of(config).declared, "evaluation_pass", return_value=slow, create=True):
            assert judging.pass_s(config, CPU) == pytest.approx(0.002, rel=0.3)
        assert max(count for (count,), _ in slow.call_args_list) == 64
    assert judging.pass_s(tiny(), CPU) < judging.pass_s(tiny(model__channels=64, model__blocks=3), CPU)
