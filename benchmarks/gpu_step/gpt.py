"""A small GPT of 11 million parameters on random tokens: what capture is worth for a plain loop."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunediff import Metric, Trial

VOCABULARY, LENGTH = 256, 256


@dataclass(frozen=True)
class Knobs:
    width: int = 384
    layers: int = 6
    lr: float = 3e-4


OBJECTIVE = Metric("loss", "min")
BASELINE = {"loader.batch_size": 8, "loader.workers": 0}


class Block(nn.Module):
    """Attention to earlier tokens, and a network of two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, width // 64, 64).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, n, width))
        return x + self.narrow(F.gelu(self.wide(self.norm2(x))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


def train(trial: Trial) -> None:
    texts = torch.randint(
        VOCABULARY, (1024, LENGTH + 1), generator=torch.Generator().manual_seed(0)
    )
    net = trial.prepare(GPT(trial.knobs.width, trial.knobs.layers))
    optimizer = torch.optim.AdamW(net.parameters(), trial.knobs.lr, fused=True)
    trial.keep(net=net, optimizer=optimizer)
    for text in trial.batches(texts):
        with trial.autocast():
            loss = F.cross_entropy(net(text[:, :-1]).flatten(0, 1).float(), text[:, 1:].flatten())
        trial.step(loss, optimizer, clip_norm=1.0)
