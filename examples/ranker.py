"""Which line says what a function does? Candidates are ranked by their cosine with the function's text, and the right
one is to be above the others by a margin, as SimCLS ranks summaries (Liu & Liu 2021, arXiv 2106.01890).

Learned from Python's standard library: the first line of a docstring belongs to all that follows in its function. The
other candidates are first lines of functions nearby, of the same module first. Judged on modules of which nothing was
learned, with 8 candidates. Chance: 0.125; words in common alone: about 0.4.
"""

import functools
import re
import sys
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from tunediff import Choice, Metric, Range, Trial


@dataclass(frozen=True)
class Knobs:
    width: Annotated[int, Choice(64, 128, 256)] = 128
    """Length of a word's vector, and of a text's."""
    lr: Annotated[float, Range(1e-3, 1e-1, log=True)] = 1e-2
    candidates: Annotated[int, Choice(4, 8, 16)] = 8
    """Lines to choose from while training; more are more to compute."""
    margin: Annotated[float, Range(0.01, 0.5, log=True)] = 0.1
    dropout: Annotated[float, Range(0.0, 0.6)] = 0.3
    """Probability that a word is overlooked."""


OBJECTIVE = Metric("accuracy", "max")
UNIT = "pairs"
BASELINE = {"loader.batch_size": 32, "loader.workers": 0}


def train(trial: Trial) -> None:
    held_out = [part.to(trial.device) for part in collate(pairs(8, held_out=True))]
    net = trial.prepare(Ranker(trial.knobs.width, trial.knobs.dropout))
    optimizer = torch.optim.Adam(net.parameters(), trial.knobs.lr)
    trial.keep(net=net, optimizer=optimizer)
    trial.evaluate_with(lambda: {"accuracy": accuracy(net, *held_out)})
    for texts, lines in trial.batches(pairs(trial.knobs.candidates), collate=collate):
        with trial.autocast():
            scores = net(texts, lines)
            loss = F.relu(trial.knobs.margin + scores[:, 1:] - scores[:, :1]).mean()
        trial.step(loss, optimizer)


class Ranker(nn.Module):
    """A text's vector is a weighted mean of its words' vectors; the weights are learned too."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.vectors = nn.EmbeddingBag(WORDS, width, mode="sum", padding_idx=0)
        self.weights, self.dropout = nn.Embedding(WORDS, 1), nn.Dropout(dropout)
        nn.init.zeros_(self.weights.weight)

    def encode(self, words: Tensor) -> Tensor:
        weights = self.weights(words).squeeze(-1).masked_fill(words == 0, -torch.inf).softmax(-1)
        return F.normalize(self.vectors(words, per_sample_weights=self.dropout(weights)), dim=-1)

    def forward(self, texts: Tensor, lines: Tensor) -> Tensor:
        """Cosines [B, candidates] of texts [B, words] and lines [B, candidates, words]."""
        encoded = self.encode(lines.flatten(0, 1)).unflatten(0, lines.shape[:2])
        return (self.encode(texts).unsqueeze(1) * encoded).sum(-1)


def accuracy(net: nn.Module, texts: Tensor, lines: Tensor) -> Tensor:
    return (net(texts, lines).argmax(1) == 0).float().mean()  # the right line is the first


# --------------------------------------------------------------------------------------------------------------- data
WORDS = 2**14  # numbers that a word may hash to; 0 fills up
DOCUMENTED = r'^( *)(?:async )?def \w+\((?:[^"()]|\([^"()]*\))*\)[^"\n]*:\n\1 +r?"""(.+?)(?:"""|$)((?:\n(?:\1 .*)?)*)'
NOT_EVERYWHERE = {"idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip", "distutils"}
Words = tuple[int, ...]


@functools.cache
def functions() -> list[tuple[str, Words, Words]]:
    """(module, first line of a docstring, what follows it), in the order of the files; no line twice."""
    entries: dict[Words, tuple[str, Words, Words]] = {}
    root = Path(sysconfig.get_path("stdlib"))
    for module in sorted(sys.stdlib_module_names - NOT_EVERYWHERE):
        for file in [*root.glob(f"{module}.py"), *sorted(root.glob(f"{module}/**/*.py"))]:
            for _, first, rest in re.findall(
                DOCUMENTED, file.read_text("utf-8", "replace"), re.MULTILINE
            ):
                line, text = words(first)[:24], words(rest.replace(first, ""))[:128]
                if len(line) >= 3 and len(text) >= 8:
                    entries.setdefault(line, (module, line, text))
    return list(entries.values())


def words(text: str) -> Words:
    """A number for each word, by its first five letters: `returns_values` is `retur`, `value`."""
    stems = re.findall(r"(?<![a-z])[A-Z]?[a-z]{1,5}", text)
    return tuple(1 + zlib.crc32(word.lower().encode()) % (WORDS - 1) for word in stems)


def pairs(candidates: int, *, held_out: bool = False) -> list[tuple[Words, list[Words]]]:
    """Texts, each with its own line and those of its nearest neighbours, of the same module first."""
    chosen = [one for one in functions() if (zlib.crc32(one[0].encode()) % 4 == 0) == held_out]
    examples = []
    for index, (module, line, text) in enumerate(chosen):
        around = [
            (index + step) % len(chosen) for far in range(1, candidates) for step in (far, -far)
        ]
        nearest = sorted((chosen[one] for one in around), key=lambda one: one[0] != module)
        examples.append((text, [line, *(other for _, other, _ in nearest[: candidates - 1])]))
    return examples


def collate(batch: list[tuple[Words, list[Words]]]) -> tuple[Tensor, Tensor]:
    """Texts [B, words] and lines [B, candidates, words], filled up to the longest."""
    texts = pad_sequence([torch.tensor(text) for text, _ in batch], batch_first=True)
    lines = pad_sequence(
        [torch.tensor(line) for _, lines in batch for line in lines], batch_first=True
    )
    return texts, lines.unflatten(0, (len(batch), -1))
