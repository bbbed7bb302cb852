"""What a machine offers."""

import pytest

from tunediff import search_space
from tunediff.config import ConfigError
from tunediff.tuning import resources


def test_all_world_sizes_are_those_of_the_machine():
    machines = {(2, 0): (1, 2), (6, 0): (1, 2, 4), (64, 1): (1,), (64, 8): (1, 2, 4, 8), (1, 0): (1,)}
    for (cores, gpus), expected in machines.items():
        assert resources.world_sizes_of(resources.Machine(cores, gpus)) == expected


def test_a_little_of_the_machine_is_left_to_the_drivers():
    """Each driver needs 0.01 CPU: workers that take all of the cores would never be placed beside it."""
    wanted = search_space.load(search_space.find("digits"))
    for cores in (1, 2, 16):
        shared = resources.share(wanted, resources.Machine(cores, 0))
        for size in shared.sizes:
            asked = shared.place(shared.machines, size)
            assert size * asked.cpus <= cores - 0.05
            assert asked.threads >= 1


def shared(per_gpu=2, **changes):
    """A search whose trials share GPUs."""
    grid = {"loader.batch_size": [64, 128], **changes.pop("grid", {})}
    text = {"workload": "cifar10", "budget": {"per_trial": "9s"}, "grid": grid, "trials_per_gpu": per_gpu, **changes}
    return search_space.parse(text, "x.yaml")


def test_trials_that_share_a_gpu_get_parts_of_it_and_of_the_cores():
    divided = resources.share(shared(), machine := resources.Machine(16, 3))
    place = divided.place([machine], 1)
    assert divided.slots == 6
    assert place.resources == {"CPU": pytest.approx(16 / 6, abs=0.1), "GPU": 0.5}
    assert place.threads == 3


def test_trials_of_two_gpus_or_of_none_share_none():
    with pytest.raises(ConfigError, match=r"x.yaml: trials_per_gpu: 2 is not allowed here: there are no GPUs"):
        resources.share(shared(), resources.Machine(16, 0))
    with pytest.raises(ConfigError, match=r"trials of several workers have GPUs of their own; allowed: 1"):
        resources.share(shared(grid={"parallel.workers": [1, 2]}), resources.Machine(16, 2))


@pytest.mark.parametrize(
    "changes",
    [
        {"budget": {"per_trial": "9s", "unit": "device"}}, {"objective": "samples_per_s"},
        {"objective": ["frechet", "device_s"]}, {"budget": {"per_trial": "9s", "price_per_device_hour": 2.0}},
    ],
)  # fmt: skip
def test_nothing_is_counted_by_device_where_several_share_one(changes):
    assert shared(per_gpu=1, **changes).trials_per_gpu == 1
    with pytest.raises(ConfigError, match=r"x.yaml: trials_per_gpu: 2 is not allowed"):
        shared(**changes)
