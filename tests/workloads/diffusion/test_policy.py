"""The Beta policy: what it draws, what it is rewarded for, what it costs."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor

from tunediff.distributed import World, alone
from tunediff.workloads.diffusion import knobs, methods, timesteps
from tunediff.workloads.diffusion.process import Diffusion
from tunediff.workloads.diffusion.timesteps.policy import BetaPolicySampler

STEPS = 100


def policy(steps: int = STEPS, world: World | None = None, **values: Any) -> BetaPolicySampler:
    torch.manual_seed(0)
    member = methods.BetaPolicy(**({"interval": 1, "scan": 20, "queue": 5} | values))
    sampler = timesteps.build(member, Diffusion(knobs.Process(steps=steps)), 1, world or alone("cpu"))
    assert isinstance(sampler, BetaPolicySampler)
    return sampler


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(count: int = 64) -> Tensor:
    return torch.rand(count, 1, 8, 8, generator=generator(7)) * 2 - 1


class Model:
    """Stands in for the trained network: an error per timestep, lowered by every step where it was trained."""

    def __init__(self, gain: Any) -> None:
        self.errors, self.gain, self.images_evaluated = torch.ones(STEPS), gain, 0

    def errors_at(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        assert len(x0) == len(noise) == len(t)
        self.images_evaluated += len(t)
        return self.errors[t]

    def train(self, t: Tensor) -> None:
        self.errors = self.errors - self.gain(t)


def run(sampler: BetaPolicySampler, model: Any, steps: int, source: torch.Generator | None = None) -> None:
    source = source or generator()
    for _ in range(steps):
        t, _ = sampler.sample(images(), source)
        sampler.before_step(model.errors_at, source)
        model.train(t)
        sampler.after_step(model.errors_at)


class Rewarding:
    """Errors that fall more, the more of the batch lay in the upper half of the chain; each image by its own t."""

    def __init__(self) -> None:
        self.last = torch.zeros(64, dtype=torch.int64)
        self.trained = False

    def errors_at(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        if not self.trained or len(t) != 64:
            return torch.ones(len(t))
        return 1 - (self.last >= STEPS // 2).float()

    def train(self, t: Tensor) -> None:
        self.last, self.trained = t, True


def test_it_comes_to_draw_what_is_rewarded() -> None:
    sampler, model = policy(entropy=0.0), Rewarding()
    source = generator()
    for _ in range(60):
        model.trained = False
        run(sampler, model, 1, source)
    assert sampler.probabilities()[STEPS // 2 :].sum() > 0.8


def test_entropy_holds_it_back() -> None:
    found = {}
    for entropy in (0.0, 10.0):
        sampler, model, source = policy(entropy=entropy), Rewarding(), generator()
        for _ in range(60):
            model.trained = False
            run(sampler, model, 1, source)
        found[entropy] = sampler.probabilities()[STEPS // 2 :].sum().item()
    assert abs(found[10.0] - 0.5) < 0.5 * abs(found[0.0] - 0.5)


def test_no_progress_no_preference() -> None:
    """The same x0 and noise before and after: a step that changes nothing gives exactly no reward."""
    sampler = policy(entropy=0.0)
    run(sampler, Model(gain=lambda t: 0.0), 5)
    torch.testing.assert_close(
        sampler.probabilities(), torch.full((STEPS,), 1 / STEPS, dtype=torch.float64), rtol=0, atol=1e-6
    )


def test_a_step_that_overflows_teaches_nothing() -> None:
    sampler, source = policy(entropy=0.0), generator()
    run(sampler, Model(gain=lambda t: 0.0), 3, source)
    before, model = sampler.probabilities(), Model(gain=lambda t: float("nan"))
    run(sampler, model, 4, source)
    torch.testing.assert_close(sampler.probabilities(), before, rtol=0, atol=1e-6)
    assert sampler.state_dict()["queue"].isfinite().all()


def test_x0_and_noise_are_the_same_before_and_after_a_step() -> None:
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def errors_at(x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        seen.append((x0.clone(), noise.clone(), t.clone()))
        return torch.ones(len(t))

    sampler, source = policy(selected=2), generator()
    sampler.sample(images(), source)
    sampler.before_step(errors_at, source)
    sampler.after_step(errors_at)
    assert len(seen) == 6  # a scan and two selected timesteps, twice
    for before, after in zip(seen[:3], seen[3:], strict=True):
        for a, b in zip(before, after, strict=True):
            assert torch.equal(a, b)
    assert torch.equal(seen[1][1], seen[2][1])


@pytest.mark.parametrize("interval", [1, 7])
def test_look_ahead_costs_what_it_says(interval: int) -> None:
    """Per update two forward passes of one image per scanned timestep, and of the batch per selected one."""
    sampler, model = policy(interval=interval, scan=10, selected=3), Model(gain=lambda t: 0.0)
    run(sampler, model, 21)
    assert model.images_evaluated == (21 // interval) * 2 * (10 + 3 * 64)


def test_it_selects_the_timesteps_that_tell_most_about_the_whole_chain() -> None:
    """Two scanned timesteps carry the change of the whole chain; the others wobble a little on their own."""
    sampler = policy(selected=2, queue=50)
    source = generator(1)
    for _ in range(50):
        change = 0.01 * torch.randn(20, generator=source)
        change[[4, 11]] += torch.randn((), generator=source) * torch.tensor([1.0, -3.0]).abs()
        sampler.remember(change)
    assert set(sampler.state_dict()["selected"].tolist()) == set(sampler.scanned[[4, 11]].tolist())


def test_selection_orders_as_the_f_test_of_scikit_learn() -> None:
    from sklearn.feature_selection import f_regression

    sampler, rows = policy(selected=6, queue=15), torch.rand(15, 20, generator=generator(2))
    for row in rows:
        sampler.remember(row)
    score, _ = f_regression(rows.numpy(), rows.sum(1).numpy())
    assert sampler.state_dict()["selected"].tolist() == sampler.scanned[torch.tensor(score).topk(6).indices].tolist()


def test_the_reward_is_the_change_of_the_kl_term_of_ddpm() -> None:
    """½·(x0 coefficient)²·‖x0 − x̂0‖²/σ² of the posterior, from Diffusion's own tables, for t ≥ 1."""
    diffusion, sampler = Diffusion(knobs.Process(steps=STEPS)), policy()
    ab = diffusion.alphas_cumprod
    by_x0 = diffusion.posterior_coef_x0**2 / (2 * diffusion.posterior_variance) * (1 - ab) / ab
    torch.testing.assert_close(sampler.kl[1:].double(), by_x0[1:], rtol=1e-5, atol=0)


def test_full_correction() -> None:
    sampler, model = policy(entropy=0.0, importance_correction=1.0, uniform_share=0.2), Rewarding()
    source = generator()
    for _ in range(30):
        model.trained = False
        run(sampler, model, 1, source)
    t, factor = sampler.sample(images(2000), source)
    assert factor[t >= STEPS // 2].mean() < 0.9 < 1.1 < factor[t < STEPS // 2].mean()
    assert factor.max() <= 1 / 0.2 + 1e-3
    assert factor.mean().item() == pytest.approx(1.0, abs=0.1)  # E[1/(T·p)] = 1


def test_it_continues_exactly_from_its_state() -> None:
    sampler, model = policy(), Model(gain=lambda t: 0.001 * torch.bincount(t, minlength=STEPS))
    source = generator()
    run(sampler, model, 6, source)
    state, errors, drawn = copy.deepcopy(sampler.state_dict()), model.errors.clone(), source.get_state()
    run(sampler, model, 4, source)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    torch.manual_seed(99)
    again = timesteps.build(sampler.knobs, Diffusion(knobs.Process(steps=STEPS)), 1, alone("cpu"))
    assert isinstance(again, BetaPolicySampler)
    again.load_state_dict(torch.load(buffer, weights_only=True))
    model.errors = errors
    source.set_state(drawn)
    run(again, model, 4, source)
    assert torch.equal(again.probabilities(), sampler.probabilities())
    assert torch.equal(again.state_dict()["selected"], sampler.state_dict()["selected"])
    assert torch.equal(again.sample(images(), generator(3))[0], sampler.sample(images(), generator(3))[0])


# -------------------------------------------------------------------------------------------------------- distributed
