"""Balance a pole on a cart by reinforcement learning: an actor and a critic that collect their own data, as PPO does
(Schulman et al. 2017, arXiv 1707.06347). Some dozen carts are simulated at once, in torch: nothing is to be installed.

The environments are part of what learns: they are kept in checkpoints, so that a resumed training goes on exactly, and
no step is trained twice for a warm-up, since that would move them.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunediff import Choice, Metric, Range, Trial, steps

LONGEST = 200
"""Steps after which an episode ends: the largest return."""


@dataclass(frozen=True)
class Knobs:
    lr: Annotated[float, Range(3e-4, 3e-2, log=True)] = 3e-3
    width: Annotated[int, Choice(16, 32, 64)] = 32
    carts: Annotated[int, Choice(8, 16, 32)] = 16
    """Environments at once."""
    horizon: Annotated[int, Choice(16, 32, 64)] = 32
    """Steps of each environment between two updates."""
    passes: Annotated[int, Choice(2, 4, 8)] = 4
    """Over the data of an update."""
    gae: Annotated[float, Range(0.9, 0.99)] = 0.95
    """Lambda of the generalized advantage estimate (Schulman et al. 2016, arXiv 1506.02438)."""
    entropy: Annotated[float, Range(1e-4, 1e-1, log=True)] = 1e-2


OBJECTIVE = Metric("return", "max")
UNIT = "environment steps"
WARM_UP = False


class Carts:
    """Many carts with a pole each; the equations and limits of Barto, Sutton and Anderson (1983)."""

    def __init__(self, count: int, generator: torch.Generator) -> None:
        self.generator = generator
        self.state, self.age = torch.zeros(count, 4), torch.zeros(count)
        self.reset(torch.ones(count, dtype=torch.bool))

    def reset(self, which: Tensor) -> None:
        fresh = 0.1 * torch.rand(len(self.state), 4, generator=self.generator) - 0.05
        self.state = torch.where(which[:, None], fresh, self.state)
        self.age = torch.where(which, 0.0, self.age)

    def step(self, right: Tensor) -> Tensor:
        """Push every cart for 0.02 s; return which episodes have ended. A reward of 1 for each step is understood."""
        x, speed, angle, turn = self.state.unbind(1)
        force = 20.0 * right.float() - 10.0
        sine, cosine = angle.sin(), angle.cos()
        push = (force + 0.05 * turn**2 * sine) / 1.1
        turning = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        moving = push - 0.05 * turning * cosine / 1.1
        derivative = torch.stack([speed, moving, turn, turning], 1)
        self.state = self.state + 0.02 * derivative
        self.age = self.age + 1
        x, _, angle, _ = self.state.unbind(1)
        return (x.abs() > 2.4) | (angle.abs() > 12 * math.pi / 180) | (self.age >= LONGEST)

    def state_dict(self) -> dict[str, Tensor]:
        return {"state": self.state, "age": self.age, "generator": self.generator.get_state()}

    def load_state_dict(self, kept: dict[str, Tensor]) -> None:
        self.state, self.age = kept["state"].clone(), kept["age"].clone()
        self.generator.set_state(kept["generator"])


class Agent(nn.Module):
    """Logit of pushing to the right, and value."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
        )
        self.policy, self.value = nn.Linear(width, 1), nn.Linear(width, 1)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(state)
        return self.policy(features)[..., 0], self.value(features)[..., 0]


def train(trial: Trial) -> None:
    knobs = trial.knobs
    agent = trial.prepare(Agent(knobs.width))
    optimizer = torch.optim.Adam(agent.parameters(), knobs.lr)
    carts = Carts(knobs.carts, torch.Generator().manual_seed(trial.config.seed))
    trial.keep(agent=agent, optimizer=optimizer, carts=carts)
    trial.evaluate_with(lambda: {"return": mean_return(agent, trial.device)})
    for _ in steps(trial, range(10**9), samples=knobs.carts * knobs.horizon):
        with trial.phase("collect"):
            data = collect(agent, carts, knobs, trial.device)
        for _ in range(knobs.passes):
            loss = ppo_loss(agent, data, knobs.entropy)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
        trial.record_step(loss, optimizer)


@torch.no_grad()
def collect(
    agent: nn.Module, carts: Carts, knobs: Knobs, device: torch.device
) -> tuple[Tensor, ...]:
    """Return states, actions, their log-probabilities, advantages and returns, each [horizon × carts]."""
    states, actions, chances, values, ends = [], [], [], [], []
    for _ in range(knobs.horizon):
        state = carts.state.to(device)
        logits, value = agent(state)
        action = torch.bernoulli(logits.sigmoid())
        ended = carts.step(action.cpu())
        carts.reset(ended)
        states.append(state)
        actions.append(action)
        chances.append(-F.binary_cross_entropy_with_logits(logits, action, reduction="none"))
        values.append(value)
        ends.append(ended.to(device))
    values.append(agent(carts.state.to(device))[1])
    advantage, advantages = torch.zeros_like(values[0]), []
    for step in reversed(range(knobs.horizon)):
        goes_on = 1.0 - ends[step].float()
        error = 1.0 + 0.99 * values[step + 1] * goes_on - values[step]
        advantage = error + 0.99 * knobs.gae * goes_on * advantage
        advantages.insert(0, advantage)
    all_advantages = torch.stack(advantages)
    returns = all_advantages + torch.stack(values[:-1])
    normed = (all_advantages - all_advantages.mean()) / (all_advantages.std() + 1e-8)
    parts = (torch.stack(states), torch.stack(actions), torch.stack(chances), normed, returns)
    return tuple(part.flatten(0, 1) for part in parts)


def ppo_loss(agent: nn.Module, data: tuple[Tensor, ...], entropy: float) -> Tensor:
    states, actions, chances, advantages, returns = data
    logits, values = agent(states)
    now = -F.binary_cross_entropy_with_logits(logits, actions, reduction="none")
    ratio = (now - chances).exp()
    policy = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    chance = logits.sigmoid()
    spread = F.binary_cross_entropy_with_logits(logits, chance)
    return 0.5 * F.mse_loss(values, returns) - policy - entropy * spread


def mean_return(agent: nn.Module, device: torch.device) -> float:
    """Return the mean length of 32 episodes in which the likelier action is taken, the same starts every time."""
    carts = Carts(32, torch.Generator().manual_seed(0))
    alive, total = torch.ones(32), 0.0
    for _ in range(LONGEST):
        ended = carts.step((agent(carts.state.to(device))[0] > 0).cpu())
        total += float(alive.sum())
        alive = alive * (1.0 - ended.float())
        if not alive.any():
            break
    return total / 32
