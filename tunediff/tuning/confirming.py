"""Running the finalists of a search again: the folder of their runs, made once and found again on resume."""

from __future__ import annotations

from pathlib import Path

from tunediff import config as cfg
from tunediff import space as spaces
from tunediff.results import Results, confirmation
from tunediff.space import SearchSpace
from tunediff.tuning import experiment


def prepare(found: Results) -> tuple[Path, SearchSpace] | None:
    """The folder and the space of the runs that confirm `found`; None when the search has no finalist.

    `confirm` inside the folder of the search; when a raised limit has brought other finalists, `confirm-2`, and so on:
    what the first ones showed stays.
    """
    wanted = found.space.confirm
    assert wanted is not None
    content = confirmation.content(found, wanted.of, wanted.seeds, wanted.final)
    if not content["trials"]:
        return None
    number = 1
    while (folder := found.folder / confirmation.folder_name(number)).exists():
        space = spaces.load(spaces.of_search(folder))
        if cfg.read_yaml(folder / "search.yaml")["trials"] == content["trials"]:
            return folder, space
        number += 1
    content |= {"base": "baseline.yaml", "fixed": {"seed": found.space.baseline.seed + confirmation.SEED_OFFSET}}
    space = spaces.parse(content, f"{found.folder.name}: {folder.name}", found.folder)
    return folder, experiment.create(folder, space, content)
