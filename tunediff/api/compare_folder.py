"""The folder of a new comparison: both sides, their frozen code and what was asked."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff.analysis import sides as side_files
from tunediff.api.compare_setup import CompareRequest
from tunediff.core.files import write_text
from tunediff.core.refusals import writing
from tunediff.judge import frozen_code
from tunediff.judge.frozen_code import SideCode


def create(request: CompareRequest) -> None:
    """Make the folder of a comparison, with both sides and what was asked. Raises `ConfigError`."""
    folder, own_configs = request.folder, list[Any]()
    with writing("--storage", folder):
        new = folder.with_name(f".{folder.name}-{os.getpid()}")
        for config, side in zip(request.sides, side_files.SIDES, strict=True):
            (new / side).mkdir(parents=True)
            own_configs.append(cfg.take_along(config, new / side))
            _replace_links(new / side, request.temporary)
            write_text(new / side / "config.yaml", cfg.dump(own_configs[-1], folder=new / side))
        codes = [SideCode.of(new / side) for side in side_files.SIDES]
        freeze(new, own_configs, codes, request.draws_seeds)
        request.experiment.write(new)
        new.rename(folder)  # a folder of that name is complete, whenever this process is killed


def freeze(new: Path, configs: Sequence[Any], codes: Sequence[SideCode], draws: bool) -> None:
    """Write the code of both sides into the folder of a comparison, and give them their seeds,
    which stay as far from each other as they are."""
    seed = before = configs[0].seed
    if draws:
        seed = frozen_code.drawn_seed([code.digest for code in codes])
        for config, side in zip(configs, side_files.SIDES, strict=True):
            seeded = cfg.override(config, {"seed": config.seed - before + seed}, check=False)
            write_text(new / side / "config.yaml", cfg.dump(seeded, folder=new / side))
    frozen_code.write(new, codes, seed, draws)


def _replace_links(folder: Path, temporary: Path) -> None:
    """Replace links into a folder that is removed before the runs by copies of the data."""
    for link in [path for path in folder.rglob("*") if path.is_symlink()]:
        data = link.resolve()
        # git may not hold what a link in a revision names
        if data.is_relative_to(temporary) and data.exists():
            link.unlink()
            if data.is_dir():
                shutil.copytree(data, link, symlinks=True)
            else:
                shutil.copy2(data, link)
