"""What it does: nothing that its tests need."""

from tests.toy.train import train

__all__ = ["train"]
