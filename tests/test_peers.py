"""The peers are given what ours has: the comparison would mean nothing otherwise."""

import torch

from benchmarks.peers import contenders as peers
from tests.helpers import CPU, tiny
from tunediff import config as cfg
from tunediff.workloads.diffusion import unet


def test_diffusers_gets_our_network():
    config = tiny()
    torch.manual_seed(1)
    ours = unet.network(config.knobs).eval()
    torch.manual_seed(1)
    job = peers.Job("diffusers", False, False, dict(cfg.flat(config)), False, 1, 1)
    theirs, _, ddpm = peers._diffusers_parts(config, CPU, job)
    x, t = torch.randn(3, 1, 8, 8), torch.tensor([0, 7, 3])
    torch.testing.assert_close(theirs.eval()(x, t).sample, ours(x, t), rtol=1e-4, atol=1e-5)
    assert len(ddpm) == config.process.steps


def test_a_peer_takes_the_switches_of_the_configuration_where_it_is_told_to():
    config = tiny(memory__channels_last=True, precision__amp="bf16")
    plain, same = (peers.Job("diffusers", False, told, dict(cfg.flat(config)), False, 1, 1) for told in (False, True))
    for job in (plain, same):
        network, _, _ = peers._diffusers_parts(config, CPU, job)
        weight = network.down_blocks[0].resnets[0].conv1.weight
        assert weight.is_contiguous(memory_format=torch.channels_last) == job.switches
        assert peers._autocast(CPU, job)._enabled == job.switches
    assert (plain.label, same.label) == ("diffusers", "diffusers, same switches")
