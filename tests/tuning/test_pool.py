"""Who gets which devices of which machine, computed by hand; no cluster."""

import pytest

from tunediff import config as cfg
from tunediff import search_space
from tunediff.config import ConfigError
from tunediff.tuning import resources
from tunediff.tuning.resources import Machine, Placement, Pool, divided


def gpus(count, cores=None, name="a"):
    return Machine(cores or 2 * count, count, name, f"id-{name}")


def cpus(cores, name="a"):
    return Machine(cores, 0, name, f"id-{name}")


def share(*machines, sizes=(1,), strategies=()):
    return divided(machines, sizes, ["none"], "x.yaml", strategies=strategies)


def taken(pool, *sizes):
    """The nodes of the seats that trials of these sizes get one after the other; None: it has to wait."""
    seats = [pool.take(size) for size in sizes]
    return [seat and ",".join(node.removeprefix("id-") for node in seat.place.nodes) for seat in seats]


def test_eight_gpus_run_eight_trials_or_one_of_four_and_four_of_one():
    of = share(gpus(8), sizes=(1, 2, 4))
    assert (of.slots, of.least) == (8, 2)
    assert taken(Pool(of), *[1] * 9) == [*["a"] * 8, None]
    pool = Pool(of)
    assert taken(pool, 4, 1, 1, 1, 1, 1) == ["a"] * 5 + [None]
    assert not pool.room()
    pool.give(0)
    assert taken(pool, 2, 2, 2) == ["a", "a", None]


def test_each_gpu_has_its_nodes_share_of_the_cores():
    """16 cores for 8 GPUs leave 15.84 of them; 64 cores for 4 leave 63.9."""
    poor, rich = gpus(8, 16, "poor"), gpus(4, 64, "rich")
    of = share(rich, poor, sizes=(1, 12))
    assert of.machines == (poor, rich)
    assert of.place([poor], 1) == Placement(("id-poor",), 1.98, True, 2)
    assert of.place([rich], 1) == Placement(("id-rich",), 15.97, True, 16)
    assert of.place([poor, rich], 12) == Placement(("id-poor", "id-rich"), 1.98, True, 2), (
        "the least, where it spans both"
    )


def test_workers_of_one_trial_stay_on_one_node_as_long_as_they_fit():
    two = gpus(8, name="a"), gpus(8, name="b")
    pool = Pool(share(*two, sizes=(1, 8, 12)))
    assert taken(pool, 1, 8, 8) == ["a", "b", None], "never 7 of one node and 1 of the other"
    pool = Pool(share(*two, sizes=(1, 4)))
    assert taken(pool, 4, 1, 1, 4, 4) == ["a", "a", "a", "b", "b"], "small ones fill a node up"
    assert taken(Pool(share(*two, sizes=(12,))), 12, 12) == ["a,b", None]


@pytest.mark.parametrize(
    ("machines", "sizes", "expected", "cores", "slots"),
    [
        ((cpus(2),), (1, 1), ["a", None], 1.9, 1),
        ((cpus(2, "a"), cpus(2, "b")), (1, 1, 1), ["a", "b", None], 1.9, 2),
        ((cpus(1, "a"), cpus(1, "b")), (2,), ["a,b"], 0.9, 1),  # one core each, on two nodes
        ((cpus(2, "a"), cpus(1, "b")), (3,), ["a,b"], 0.9, 1),
        ((cpus(4, "a"), cpus(4, "b"), cpus(4, "c")), (5, 1), ["a,b", "c"], 0.97, 3),
        ((cpus(0, "head"), cpus(4, "b")), (2, 1), ["b", None], 1.95, 1),
    ],
)  # fmt: skip
def test_without_gpus_a_trial_has_its_nodes_to_itself(machines, sizes, expected, cores, slots):
    of = share(*machines, sizes=tuple(sorted(set(sizes))))
    pool = Pool(of)
    seat = pool.take(sizes[0])
    assert [",".join(node.removeprefix("id-") for node in seat.place.nodes), *taken(pool, *sizes[1:])] == expected
    assert (seat.place.cpus, of.slots) == (cores, slots)


def test_one_process_gets_its_gpus_on_one_node(clock):
    """`parallel.strategy: dp`: four GPUs with four GPUs' cores and threads; never two of one node and two of another."""
    there = [gpus(4, name="a"), gpus(4, name="b")]
    of = share(*there, sizes=(2, 4), strategies=["ddp", "dp"])
    pool = Pool(of, lambda: there)
    seat = pool.take(4, together=True)
    assert (seat.place, seat.place.resources) == (Placement(("id-a",), 7.88, True, 8, 4), {"CPU": 7.88, "GPU": 4.0})
    assert pool.take(4).place == Placement(("id-b",), 1.97, True, 2, 1)
    there[:], clock.s = (gpus(2, name="c"), gpus(2, name="d")), 60.0
    assert pool.take(4, together=True) is None
    assert pool.take(4).place.nodes == ("id-c", "id-d"), "four processes may span nodes"


def test_one_process_for_several_gpus_is_refused_where_no_node_has_them():
    machines = gpus(4, name="a"), gpus(4, name="b")
    with pytest.raises(cfg.ConfigError) as refused:
        share(*machines, sizes=(1, 8), strategies=["dp"])
    assert str(refused.value) == (
        "x.yaml: parallel.strategy: 'dp': 8 GPUs of one machine are not allowed here; "
        "there are a: 8 CPU cores, 4 GPUs; b: 8 CPU cores, 4 GPUs; allowed: at most 4"
    )
    with pytest.raises(cfg.ConfigError, match="strategy: 'dp': 2 GPUs of one machine are not allowed"):
        share(cpus(4), sizes=(1, 2), strategies=["dp"])
    share(cpus(4), strategies=["dp"])  # one worker trains alone, whatever it is called


def test_what_fits_nowhere_is_refused_with_the_numbers():
    with pytest.raises(cfg.ConfigError) as refused:
        share(gpus(2, name="a"), gpus(4, name="b"), cpus(64, "c"), sizes=(1, 8))
    assert str(refused.value) == (
        "x.yaml: parallel.workers: 8 is not allowed on this cluster; each worker needs one GPU and there are "
        "a: 4 CPU cores, 2 GPUs; b: 8 CPU cores, 4 GPUs; c: 64 CPU cores, 0 GPUs; allowed: at most 6"
    )
    of = share(gpus(2), cpus(64, "c"))
    assert of.machines == (gpus(2),)
    with pytest.raises(cfg.ConfigError, match="there are no nodes; allowed: at most 0"):
        share()


def test_nodes_that_go_and_come(clock):
    """What a lost node gave is nobody's; a new one is used."""
    there = [cpus(2, "a"), cpus(2, "b")]
    pool = Pool(share(*there), lambda: there)
    assert taken(pool, 1, 1, 1) == ["a", "b", None]
    there[:] = [cpus(2, "b"), cpus(2, "c")]
    clock.s = 60.0
    assert taken(pool, 1, 1) == ["c", None]
    pool.give(0)
    pool.give(1)
    assert taken(pool, 1) == ["b"]


def test_a_slot_whose_workers_are_warm_is_used_again():
    heard = []
    pool = Pool(share(cpus(2, "a"), cpus(2, "b")), taken=lambda slot, actor: heard.append(actor), prefix="s")
    seats = [pool.take(1), pool.take(1)]
    pool.give(0)
    pool.give(1)
    assert pool.take(1) == seats[0]
    pool.give(0)
    assert heard == ["s0", "s1", "s0"]


# ------------------------------------------------------------------------------------------------ what a machine offers
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
