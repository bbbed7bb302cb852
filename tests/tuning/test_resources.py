"""What a machine offers."""

from tunediff import search_space
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


def test_one_trial_has_all_gpus_where_it_asks_to_be_alone():
    text = {"workload": "cifar10", "objective": "samples_per_s", "budget": {"per_trial": "9s"}}
    for alone, slots in ((False, 4), (True, 1)):
        wanted = search_space.parse({**text, "alone": alone, "grid": {"loader.batch_size": [64, 128]}}, "x.yaml")
        assert resources.share(wanted, resources.Machine(16, 4)).slots == slots
