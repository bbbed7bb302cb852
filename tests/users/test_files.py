"""A user's file as a workload: found, known by its content, taken along."""

import dataclasses
import importlib
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers import CPU
from tunediff import config as cfg
from tunediff import search, search_space, train
from tunediff.api import train_run
from tunediff.api.calls import words
from tunediff.api.train_run import TrainOptions
from tunediff.config import ConfigError, code
from tunediff.config.code import WorkloadError
from tunediff.core.clock import Budget
from tunediff.core.text import SCHEMA
from tunediff.inspector import check
from tunediff.search_space import content as file_content
from tunediff.training.engine import Engine
from tunediff.training.judging import judged
from tunediff.training.observer import Observer
from tunediff.training.trial import Trial, run

PLAIN = (Path(__file__).parent / "plain.py").read_text()


@pytest.fixture
def mine(tmp_path, at_tmp_path):
    (tmp_path / "mine.py").write_text(PLAIN)
    return tmp_path / "mine.py"


def trained(config, folder=None, samples=64):
    return run(Engine(config, Budget(samples=samples), CPU, Observer(), folder=folder))


@pytest.mark.parametrize(
    "words", ["knobs --workload mine.py", "train --config mine.py --samples 64", "search mine.py --dry-run --no-check"]
)
def test_what_the_file_prints_is_not_in_the_json(mine, capsys, words):
    mine.write_text(
        f"print('reads data for', {words!r})\n{PLAIN}".replace("    net =", "    print('net')\n    net =", 1)
    )
    command, *words = words.split()
    assert importlib.import_module(f"tunediff.{command}").main([*words, "--json"]) == 0
    out, error = capsys.readouterr()
    assert json.loads(out)["schema"] == SCHEMA
    assert "reads data for" in error


def test_its_knobs_are_knobs_like_ours(mine):
    config = cfg.baseline("mine.py")
    assert (config.width, config.loader.batch_size, config.knobs.lr) == (8, 16, 0.01)
    assert config.schema.knobs["width"].description == "Of the hidden layer."
    assert cfg.baseline("mine.py:large").width == 16
    assert cfg.named(Path("mine.py"), ["lr=1e-3", "loader.batch_size=8"]).lr == 1e-3
    with pytest.raises(ConfigError, match="command line: width: 'wide' is not allowed; allowed: a whole number"):
        cfg.named(Path("mine.py"), ["width=wide"])
    with pytest.raises(ConfigError, match="command line: widht: no such knob; did you mean width"):
        cfg.named(Path("mine.py"), ["widht=3"])
    assert pickle.loads(pickle.dumps(config)) == config


def test_parse_args_at_the_top_of_a_file_gets_no_options_of_tunediff(mine, called_as):
    called_as("tunediff", "--trials", "4")
    lines = "import argparse\nimport sys\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr', default=3)\n"
    mine.write_text(PLAIN + lines + "args, given = parser.parse_args(), list(sys.argv)\n")
    declared = cfg.find("mine.py").declared
    assert declared.args.lr == 3
    assert declared.given == [str(mine)]


def test_a_module_of_a_package_brings_what_it_imports(tmp_path, at_tmp_path):
    for name, text in {
        "__init__.py": "", "nets.py": "from . import sizes\nWIDTH = sizes.WIDTH\n", "sizes.py": "WIDTH = 8\n",
        "training.py": PLAIN.replace("from torch import nn\n", "from torch import nn\n\nfrom .nets import WIDTH\n"),
        "unused.py": "", "late.py": "ANSWER = 42\n",
    }.items():  # fmt: skip
        (tmp_path / "mypkg").mkdir(exist_ok=True)
        (tmp_path / "mypkg" / name).write_text(text)
    found = cfg.find("mypkg.training")
    assert found.file.root == tmp_path
    assert sorted(str(path) for path in found.file.contents if path.parts[0] == "mypkg") == [
        f"mypkg/{n}.py" for n in ("__init__", "late", "nets", "sizes", "training", "unused")
    ]
    before = found.file.version
    (tmp_path / "mypkg/sizes.py").write_text("WIDTH = 16\n")
    assert cfg.find("mypkg.training").file.version != before
    with (tmp_path / "mypkg/training.py").open("a") as file:
        file.write("\n\ndef later():\n    from mypkg import late\n\n    return late.ANSWER\n")
    assert cfg.find("mypkg.training").declared.later() == 42
    copy = cfg.take_along(cfg.baseline("mypkg.training"), tmp_path / "s")
    assert (tmp_path / "s/workload/mypkg/late.py").exists(), "what may be imported later lies beside it"
    assert copy.schema.version == cfg.find("mypkg.training").file.version


def test_the_content_and_not_the_place_makes_the_fingerprint(mine):
    config = cfg.baseline("mine.py")
    copy = cfg.take_along(config, mine.parent / "search")
    assert copy.schema.workload == str(mine.parent / "search/workload/mine.py")
    assert cfg.fingerprint(copy) == cfg.fingerprint(config)
    assert cfg.differences(copy, config) == {}
    assert cfg.take_along(copy, mine.parent / "search") is copy
    mine.write_text(PLAIN + "\n# changed\n")
    assert cfg.fingerprint(cfg.baseline("mine.py")) != cfg.fingerprint(config)
    with pytest.raises(ConfigError, match="is of another workload already"):
        cfg.take_along(cfg.baseline("mine.py"), mine.parent / "search")


def test_a_full_disk_is_no_fault_of_the_file(mine, in_this_process, monkeypatch, capsys):
    """The disk is full when the first evaluation is written; a traceback of the user's code would be no help."""
    monkeypatch.setattr(os, "fsync", os.fsync)  # put back at the end
    fails = "    import os\n\n    def full(descriptor):\n        raise OSError(28, 'No space left on device')\n\n    os.fsync = full\n"
    mine.write_text(PLAIN.replace("    net = trial.prepare(net)\n", fails + "    net = trial.prepare(net)\n"))
    assert train.main(["--config", "mine.py", "--samples", "64", "--out", "out"]) == 1
    said = capsys.readouterr().err
    assert re.fullmatch(r"error: \S+/out/checkpoint\.pt: No space left on device\n", said)


def test_train_takes_the_mended_file_after_a_first_try_that_failed(mine, in_this_process, capsys):
    """A file of which steps were kept stays as it is."""
    words = ["--config", "mine.py", "--samples", "32", "--out", "out"]
    mine.write_text(PLAIN.replace("net = trial.prepare(net)", "net = trial.prepare(missing)"))
    assert train.main(words) == 1
    assert "missing" in capsys.readouterr().err
    mine.write_text(PLAIN)
    assert train.main(words) == 0
    mine.write_text(PLAIN + "\n# changed\n")
    assert train.main(words) == 2
    assert "holds another training" in capsys.readouterr().err
    mine.write_text(PLAIN)
    assert train.main([*words, "loader.batch_size=4"]) == 2
    assert "loader.batch_size=4" in capsys.readouterr().err
    assert (mine.parent / "out/workload/mine.py").read_text() == PLAIN


def test_a_configuration_names_the_file_beside_it(mine, tmp_path):
    config = cfg.take_along(cfg.baseline("mine.py:large"), tmp_path / "out")
    (tmp_path / "out/best.yaml").write_text(cfg.dump(config, folder=tmp_path / "out"))
    assert "workload: workload/mine.py\n" in (tmp_path / "out/best.yaml").read_text()
    mine.unlink()
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    found = cfg.load(tmp_path / "elsewhere/best.yaml")
    assert (found.width, cfg.fingerprint(found)) == (16, cfg.fingerprint(config))


# ------------------------------------------------------------------------------------------------------- what is searched
def test_the_file_alone_is_a_search(mine):
    content = search_space.completed(
        search_space.read(Path("mine.py")), Path("mine.py"), ["lr=0.02"], cores=4, gpu=False
    )
    content, words, _ = search_space.narrow(content, "mine.py", Path(), ["lr=0.02"])
    assert content["search"] == {
        "width": {"choice": [4, 8, 16]}, "loader.batch_size": [8, 16, 32, 64], "loader.workers": [0, 1, 2],
        "precision.amp": ["none", "bf16"],
    }  # fmt: skip
    found = search_space.parse(content, "mine.py", Path(), words)
    assert (found.metric, found.mode, found.label, found.baseline.lr) == ("accuracy", "max", "accuracy", 0.02)
    assert found.candidates[0] == {"width": 8, "loader.batch_size": 16, "loader.workers": 0, "precision.amp": "none"}
    gpu = file_content.infer_search_space(cfg.baseline("mine.py"), cores=16, gpu=True)
    assert {"compile.mode", "memory.channels_last", "precision.matmul", "lr"} <= gpu.keys()
    assert gpu["lr"] == {"low": 1e-3, "high": 1e-1, "log": True}


def test_a_search_file_narrows_or_replaces(mine, tmp_path):
    budget = {"per_trial": "1s", "trials": 2}
    (tmp_path / "files").mkdir()
    content = {"workload": "../mine.py", "budget": budget, "search": {"lr": None, "width": [4, 8]}}
    found = search_space.parse(content, "my.yaml", tmp_path / "files")
    assert [(one.name, one.low, one.high, one.log, one.choices) for one in found.dimensions] == [
        ("lr", 1e-3, 1e-1, True, None), ("width", 0.0, 0.0, False, (4, 8)),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="my.yaml: search: dropout: None is not a space"):
        search_space.parse({**content, "search": {"dropout": None}}, "my.yaml", tmp_path / "files")
    with pytest.raises(ConfigError, match="exactly one of search:, grid:"):
        search_space.parse({"workload": str(mine), "budget": budget}, "my.yaml")


# ------------------------------------------------------------------------------------------------------------- trained


def test_a_finished_model_is_judged_by_its_own_evaluation(mine):
    config = cfg.baseline("mine.py")
    outcome = trained(config)
    assert judged(config, outcome.weights, CPU)["accuracy"] == outcome.points[-1]["accuracy"]
    fresh = trained(config, samples=16)
    weights = {name: 0 * tensor for name, tensor in fresh.weights.items()}
    assert judged(config, weights, CPU)["accuracy"] == 0.0


def test_a_copy_is_the_same_module(mine, tmp_path):
    """What a search has read is not imported a second time from its copy; what was edited is."""
    first = cfg.find("mine.py").declared
    assert cfg.of(cfg.take_along(cfg.baseline("mine.py"), tmp_path / "s")).declared is first
    mine.write_text(PLAIN.replace("class Knobs:", "class Knobs:\n    depth: int = 1"))
    assert cfg.find("mine.py").declared is not first
    assert cfg.baseline("mine.py").depth == 1


def test_two_versions_take_turns_each_with_its_own_modules(tmp_path):
    """As in one worker that trains both sides of a comparison: functions import later, loader processes pickle."""
    for side in "ab":
        (tmp_path / side).mkdir()
        (tmp_path / side / "mine.py").write_text(
            f"import helper\n{PLAIN}\n\nclass Numbers: ...\n\n\ndef late():\n    import helper\n    return helper.SIDE\n"
        )
        (tmp_path / side / "helper.py").write_text(f"SIDE = {side!r}\n")
    configs = {side: cfg.baseline(str(tmp_path / side / "mine.py")) for side in "ab"}
    for side in "abba":
        module = cfg.of(configs[side]).code
        assert module.late() == side
        assert type(pickle.loads(pickle.dumps(module.Numbers()))) is module.Numbers


def test_a_file_says_where_the_systems_knobs_are_searched(mine):
    mine.write_text(PLAIN + '\nSEARCH = {"loader.batch_size": [16, 64], "parallel.workers": [1, 2]}\n')
    found = file_content.infer_search_space(cfg.baseline("mine.py"), cores=1, gpu=False, leave=["width"])
    assert found["loader.batch_size"] == [16, 64]
    assert list(found) == ["lr", "loader.batch_size", "parallel.workers", "loader.workers", "precision.amp"]
    mine.write_text(PLAIN + '\nSEARCH = {"loader": {"batch_size": [16, 64]}}\n')
    found = file_content.infer_search_space(cfg.baseline("mine.py"), cores=1, gpu=False)
    assert (found["loader.batch_size"], "loader" in found) == ([16, 64], False)
    mine.write_text(PLAIN + '\nSEARCH = ["loader.batch_size"]\n')
    with pytest.raises(cfg.ConfigError, match=r"^mine.py: SEARCH is "):
        file_content.infer_search_space(cfg.baseline("mine.py"), cores=1, gpu=False)


def test_a_script_that_is_no_workload_is_refused_before_it_runs(tmp_path):
    script = tmp_path / "study.py"
    script.write_text(f"from pathlib import Path\nPath('{tmp_path}/ran').touch()\n")
    with pytest.raises(ConfigError, match="has no class Knobs.*it was not run; any script is searched"):
        cfg.baseline(str(script))
    assert not (tmp_path / "ran").exists()


def test_lists_may_be_choices(tmp_path):
    mine, space = tmp_path / "lists.py", "Annotated[tuple[int, ...], Choice((1, 2), (1, 2, 4))]"
    mine.write_text(PLAIN.replace("    dropout: float", f"    widths: {space} = (1, 2)\n    dropout: float"))
    found = file_content.infer_search_space(cfg.baseline(str(mine)), cores=1, gpu=False)
    assert found["widths"] == {"choice": [[1, 2], [1, 2, 4]]}


@pytest.mark.parametrize(
    ("knob", "refused"),
    [
        ("dropout: Annotated[float, Range(0.1, 0.9)] = 0.0", r"dropout: 0.0, the baseline's value, lies outside the space; allowed: 0.1 … 0.9"),
        ("dropout: Annotated[int, Choice(1, 2)] = 3", r"dropout: 3, the baseline's value, lies outside the space; allowed: \[1, 2\]"),
        ('dropout: Annotated[str, Range(0, 1)] = "a"', r"dropout: a range needs a number"),
        ("dropout: Annotated[float | None, Range(0.1, 1.0)] = None", r"dropout: None, the baseline's value, lies outside"),
        ("dropout: Annotated[float, Range('a', 'b')] = 0.1", r"dropout: low: dropout: 'a' is not allowed; allowed: a number"),
    ],
)  # fmt: skip
def test_a_default_outside_its_space_is_refused_before_a_search(tmp_path, knob, refused):
    mine = tmp_path / "mine.py"
    mine.write_text(PLAIN.replace("dropout: float = 0.0", knob))
    content = {"workload": str(mine), "budget": {"per_trial": "9s", "trials": 2}}
    content = file_content.completed(content, mine, [], cores=1, gpu=False)
    with pytest.raises(cfg.ConfigError, match=refused):
        search_space.parse(content, "x.yaml")


def test_noise_is_that_of_the_whole_batch(mine):
    config = cfg.baseline("mine.py")
    alone, of_two = (
        Trial(Engine(config, Budget(samples=1), world, Observer()))
        for world in (CPU, dataclasses.replace(CPU, rank=1, size=2))
    )
    whole, part = alone.randn_like(torch.empty(16, 3)), of_two.randn_like(torch.empty(8, 3))
    assert torch.equal(part, whole[8:])
    whole, part = alone.randn_like(torch.empty(16, 3)), of_two.randn_like(torch.empty(1, 3))
    assert torch.equal(part, whole[8:9]), "as many rows as the last batch of a pass has"
    with pytest.raises(WorkloadError, match="trial.randn_like: 9 rows, and this rank's part of loader.batch_size is 8"):
        of_two.randn_like(torch.empty(9, 3))


def checked_space(tmp_path, text, **search):
    """Return the space that is left of a file's own, or of `search`, once the file was tried; and what was said."""
    Path("mine.py").write_text(text)
    content = search_space.completed(search_space.read(Path("mine.py")), Path("mine.py"), [], cores=2, gpu=False)
    wanted, said = search_space.parse({**content, **({"search": search} if search else {})}, "mine.py"), []
    created, found = check.create(
        tmp_path / "s", wanted, {**content, **({"search": search} if search else {})}, said.append
    )
    again = search_space.load(tmp_path / "s/experiment.yaml")
    assert (again.dimensions, again.candidates) == (created.dimensions, created.candidates)
    return created, found, said


def test_what_the_check_has_not_seen_read_is_warned_of_and_stays_in_the_space(mine, tmp_path, check_says):
    check_says({"warnings": ["an odd loader"], "unread": ["loader.workers", "loader.batch_size"], "value": 0.5})
    created, _, said = checked_space(tmp_path, PLAIN, **{"loader.batch_size": [16, 32], "lr": [0.01, 0.1]})
    assert [dimension.name for dimension in created.dimensions] == ["loader.batch_size", "lr"]
    assert said[:2] == ["mine.py: passed; accuracy 0.5 after 2 steps", "WARNING: mine.py: an odd loader"]
    assert "never saw train(trial) read loader.batch_size: searched" in said[2]


OWN_LOADER = PLAIN.replace("trial.batches((X, Y))", "tunediff.steps(trial, [(X[:8], Y[:8])])")


@pytest.mark.nightly
def test_a_search_of_knobs_that_nobody_reads_is_refused(mine, tmp_path):
    """As with a parser of command lines, which does not get the knobs."""
    text = OWN_LOADER.replace("trial.knobs", "Knobs()").replace("with trial.autocast():", "if True:")
    with pytest.raises(ConfigError, match=r"mine.py: nothing to search: train\(trial\) never reads .*lr.*width"):
        checked_space(tmp_path, text, lr=[0.01, 0.1], width=[4, 8])
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("option", ["--check", "--dry-run"])
def test_plan_of_a_file_follows_its_check(mine, check_says, capsys, option):
    report = {"warnings": ["an odd loader"], "unread": ["loader.batch_size"], "evaluation_s": 3.0}
    check_says(report | {"parameters": 99, "value": 1.0})
    assert search.main(["mine.py", option]) == 0
    out, err = capsys.readouterr()
    assert "an odd loader" in err
    assert "search: mine.py (" in out
    assert "evaluation: about 1m36s" in out, "two points of each of 16 trials, by the check's seconds"
    assert "parameters: 99" in out
    assert "  width: " in out
    assert "  loader.batch_size: " in out
    assert not Path("ray_results").exists()


# --------------------------------------------------------------------------------------------- data beside the file
BESIDE = PLAIN.replace(
    "X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))",
    'from pathlib import Path\n\nX = torch.load(Path(__file__).parent / "data" / "x.pt")',
)


@pytest.fixture
def beside(tmp_path, at_tmp_path):
    """A package whose module reads data beside it."""
    for folder in ("datapkg/data", "datapkg/other", "datapkg/.cache", "ray_results"):
        (tmp_path / folder).mkdir(parents=True)
    torch.save(torch.ones(64, 4), tmp_path / "datapkg/data/x.pt")
    for name, text in {"__init__": "", "train": BESIDE, "unused": "", "other/__init__": ""}.items():
        (tmp_path / f"datapkg/{name}.py").write_text(text)
    return tmp_path


def loaded_alone(path):
    """What the module of a copy prints of its data, in a process that has not imported the original."""
    text = f"from tunediff.config import find; print(find({str(path)!r}).declared.X.sum().item())"
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)


def test_data_beside_the_file_is_linked_into_its_copies(beside):
    night = beside / "ray_results/night"
    config = cfg.take_along(cfg.baseline("datapkg/train.py"), night)
    copy = night / "workload/datapkg"
    assert {path.name for path in copy.iterdir()} == {"__init__.py", "train.py", "unused.py", "other", "data"}
    assert not (copy / "other").is_symlink(), "modules are copied, and nothing hidden is linked"
    assert not (night / "workload/ray_results").exists(), "a folder does not lie in itself"
    assert loaded_alone(copy / "train.py").stdout == "256.0\n"
    (beside / "out").mkdir()
    exported = cfg.take_along(config, beside / "out")
    assert exported.schema.workload == str(beside / "out/workload/datapkg/train.py")
    assert {path.name for path in (beside / "out/workload").iterdir()} == {"datapkg", code.MARK}
    assert (beside / "out/workload/datapkg/data").readlink() == beside / "datapkg/data", "without the search in between"
    assert cfg.fingerprint(exported) == cfg.fingerprint(cfg.baseline("datapkg/train.py"))


def test_a_preset_has_the_last_word(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom tunediff import Metric\nOBJECTIVE = Metric('score', 'max')\n"
        "BASELINE = {'loader.batch_size': 16, 'optimizer': 0.1}\nPRESETS = {'large': {'loader.batch_size': 64}}\n"
        "@dataclass(frozen=True)\nclass Knobs:\n    optimizer: float = 0.5\n\ndef train(trial): ...\n"
    )
    config = cfg.baseline(f"{tmp_path / 'mine.py'}:large")
    assert (config.loader.batch_size, config.knobs.optimizer) == (64, 0.1)


TEXTS = (
    PLAIN.replace(
        "    dropout: float = 0.0\n",
        """    dropout: float = 0.0
    note: str = ""
    path: Annotated[str, File()] | None = None
    mode: Literal["on", "off", "none"] = "on"
""",
    )
    .replace("import Annotated", "import Annotated, Literal")
    .replace("import Choice", "import File, Choice")
)


@pytest.mark.parametrize("note", ["run #2", "my photos #1", "3", "2024-01-01", "a: b", "[new] photos", "off", "null", "",
                                  "~", "'quoted'", '"', " x ", "1e-3", "*a", "ü 😀", "two\nlines"])  # fmt: skip
def test_text_from_python_is_the_knobs_value_as_it_is(tmp_path, note):
    baseline = cfg.baseline(str(texts(tmp_path)))
    assert cfg.with_words(baseline, words(({"note": note},))).knobs.note == note


def test_text_on_the_command_line_needs_no_quotes(tmp_path):
    baseline = cfg.baseline(str(texts(tmp_path)))
    for word, value in {"mode=off": "off", "mode='off'": "off", "note=2024": "2024", "note='2024'": "2024"}.items():
        name = word.partition("=")[0]
        assert getattr(cfg.with_words(baseline, [word]).knobs, name) == value
    assert cfg.with_words(baseline, ["path=my photos #1"]).knobs.path == str(Path.cwd() / "my photos #1")
    assert cfg.with_words(baseline, ["path=null"]).knobs.path is None
    with pytest.raises(cfg.ConfigError, match="mode: True is not allowed; allowed: one of on, off"):
        cfg.with_words(baseline, ["mode=true"])


def texts(folder):
    path = folder / "texts.py"
    path.write_text(TEXTS)
    return path


def test_a_section_of_ones_own_with_the_name_of_ours_may_train_without_an_end(tmp_path):
    own = tmp_path / "own.py"
    text = PLAIN.replace(
        "class Knobs:", "class Own:\n    decay: float = 0.1\n\n\n@dataclass(frozen=True)\nclass Knobs:"
    )
    own.write_text(text.replace("    dropout: float = 0.0\n", "    dropout: float = 0.0\n    optimizer: Own = Own()\n"))
    assert train_run.prepare(TrainOptions(config=own, out=tmp_path / "run")).budget.open_ended
    with pytest.raises(
        cfg.ConfigError, match="optimizer.decay: 'cosine' is not allowed; allowed: constant without --budget"
    ):
        train_run.prepare(TrainOptions(config=Path("digits"), words=["optimizer.decay=cosine"], out=tmp_path / "run"))


def test_lists_of_numbers_and_of_text_are_knobs(tmp_path):
    mine = tmp_path / "lists.py"
    lists = "    betas: tuple[float, ...] = (0.9, 0.99)\n    tags: tuple[str, ...] = ()\n"
    mine.write_text(PLAIN.replace("    dropout: float", f"{lists}    dropout: float"))
    baseline = cfg.baseline(str(mine))
    for betas in ("betas=[0.9, 1e-5]", *words(({"betas": [0.9, 1e-5]},))):
        assert cfg.with_words(baseline, [betas]).knobs.betas == (0.9, 1e-5)
    for word, allowed in {"betas=[0.9, x]": "a list of numbers", "tags=[3]": "a list of strings"}.items():
        with pytest.raises(cfg.ConfigError, match=f" is not allowed; allowed: {allowed}$"):
            cfg.with_words(baseline, [word])
