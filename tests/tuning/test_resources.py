"""What a machine offers."""

from tunediff.tuning import resources


def test_all_world_sizes_are_those_of_the_machine():
    machines = {(2, 0): (1, 2), (6, 0): (1, 2, 4), (64, 1): (1,), (64, 8): (1, 2, 4, 8), (1, 0): (1,)}
    for (cores, gpus), expected in machines.items():
        assert resources.world_sizes_of(resources.Machine(cores, gpus)) == expected
