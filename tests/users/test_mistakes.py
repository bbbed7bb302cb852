"""What a user's file may get wrong, and the answer to each: before anything starts, with the line of his own."""

import re
from pathlib import Path

import pytest

from tests.helpers import check_here
from tunediff import config as cfg
from tunediff.config import ConfigError, code
from tunediff.inspector import check

PLAIN = (Path(__file__).parent / "plain.py").read_text()


def file(folder, text, name="mine.py"):
    path = folder / name
    path.write_text(text)
    return path


def edited(*changes):
    text = PLAIN
    for before, after in changes:
        assert before in text, before
        text = text.replace(before, after)
    return text


def checked(folder, text, name="mine.py"):
    """Check a workload with this text in this process."""
    return check_here(cfg.baseline(str(file(folder, text, name))))


READ = [
    ("not Python", "def train(Knobs:", r"mine.py: does not import: SyntaxError: .*\(mine.py, line 1: def train\(Knobs:\)"),
    ("a module that is not installed", "import torchh\n" + PLAIN, r"mine.py: does not import: ModuleNotFoundError: No module named 'torchh' \(mine.py, line 1: import torchh\)"),
    ("a name that does not exist", PLAIN + "\nprint(nope)\n", r"NameError: name 'nope' is not defined \(mine.py, line \d+: print\(nope\)\)"),
    ("a script that ends by itself", PLAIN + "\nraise SystemExit(3)\n", r"mine.py: does not import: SystemExit: 3 \(mine.py"),
    ("no Knobs", edited(("class Knobs", "class Nobs")), r"mine.py: has no class Knobs; write @dataclass\(frozen=True\)"),
    ("Knobs not frozen", edited(("frozen=True", "")), r"mine.py: Knobs: is not frozen; write @dataclass\(frozen=True\)"),
    ("Knobs no dataclass", edited(("@dataclass(frozen=True)\nclass Knobs:", "class Knobs(dict):")), r"mine.py: Knobs: is not a dataclass"),
    ("a knob without a default", edited(("dropout: float = 0.0", "dropout: float")), r"(mine.py: Knobs: dropout: has no default|non-default argument 'dropout')"),
    ("a knob of no kind", edited(("dropout: float = 0.0", "dropout: object = None")), r"mine.py: Knobs: dropout: unsupported type <class 'object'>; allowed: int, float"),
    ("a default of the wrong type", edited(("dropout: float = 0.0", "dropout: int = 0.5")), r"mine.py: Knobs: dropout: 0.5 is not allowed; allowed: a whole number"),
    ("a baseline that is none", PLAIN + "\nBASELINE = None\n", r"mine.py: BASELINE is None; it needs a dictionary"),
    ("a baseline that is a list", PLAIN + "\nBASELINE = ['a']\n", r"mine.py: BASELINE is \['a'\]; it needs a dictionary"),
    ("presets that are a list", PLAIN + "\nPRESETS = ['a']\n", r"mine.py: PRESETS is \['a'\]; it needs a dictionary"),
    ("a preset that is a number", PLAIN + "\nPRESETS = {'a': 3}\n", r"mine.py: PRESETS\['a'\] is 3; it needs a dictionary"),
    ("quantities that are a list", PLAIN + "\nQUANTITIES = ['a']\n", r"mine.py: QUANTITIES is \['a'\]; it needs a dictionary"),
    ("a name of the system's", edited(("dropout: float", "loader: float")), r"mine.py: Knobs: loader: every workload has a section of this name"),
    ("no objective", edited(('OBJECTIVE = Metric("accuracy", "max")', "")), r'mine.py: OBJECTIVE is None; it needs a line such as  OBJECTIVE = Metric\("accuracy", "max"\)'),
    ("an objective that is a word", edited(('OBJECTIVE = Metric("accuracy", "max")', 'OBJECTIVE = "accuracy"')), r"mine.py: OBJECTIVE is 'accuracy'; it needs a line"),
    ("a direction that is none", edited(('"max"', '"up"')), r"mine.py: OBJECTIVE: mode 'up' is not allowed; allowed: min, max"),
    ("no train", edited(("def train(", "def training(")), r"mine.py: has no function train\(trial\)"),
    ("train takes nothing", edited(("def train(trial: Trial)", "def train()")), r"mine.py: train must take one argument, the trial"),
    ("a baseline of unknown knobs", edited(("loader.batch_size", "loader.batchsize")), r"mine.py: loader.batchsize: no such knob; did you mean loader.batch_size"),
    ("a baseline of the wrong type", edited(('"loader.batch_size": 16', '"loader.batch_size": "16"')), r"mine.py: loader.batch_size: '16' is not allowed; allowed: a whole number of at least 1"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "answer"), [row[1:] for row in READ], ids=[row[0] for row in READ])
def test_mistakes_that_reading_the_file_finds(tmp_path, text, answer):
    with pytest.raises(ConfigError) as error:
        cfg.baseline(str(file(tmp_path, text)))
    assert re.search(answer, str(error.value)), str(error.value)


LOOP = "    for x, y in trial.batches((X, Y)):\n"
TRAINED = [
    ("no prepare", [("    net = trial.prepare(net)\n", "")], r"mine.py: train\(trial\): net = trial.prepare\(net\) must come before the loop"),
    ("another model is trained", [("    net = trial.prepare(net)\n", "    trial.prepare(net)\n")], "mine.py: the model that is trained is not the one that was prepared"),
    ("prepared twice", [("    net = trial.prepare(net)\n", "    net = trial.prepare(trial.prepare(net))\n")], "mine.py: trial.prepare was called twice"),
    ("prepare of no model", [("    net = trial.prepare(net)\n", "    net = trial.prepare([net])\n")], "mine.py: trial.prepare takes a torch.nn.Module, not list"),
    ("the optimizer has other parameters", [("AdamW(net.parameters()", "AdamW(nn.Linear(1, 1).parameters()")], "mine.py: the steps changed no parameter of the prepared model; does the optimizer have them"),
    ("no keep", [("    trial.keep(net=net, optimizer=optimizer)\n", "")], r"mine.py: train\(trial\): trial.keep\(net=net, optimizer=optimizer\) must come before the loop"),
    ("keep of what has no state", [("optimizer=optimizer)", "optimizer=3)")], r"keep\(optimizer=…\): int has no state_dict"),
    ("no evaluate_with", [("    trial.evaluate_with(lambda: judge(net))\n", "")], r'mine.py: train\(trial\): trial.evaluate_with\(lambda: \{"accuracy": …\}\) must come before the loop'),
    ("an evaluation without the objective", [('"accuracy": (net', '"acc": (net')], 'mine.py: evaluate_with: found acc, and not OBJECTIVE "accuracy"'),
    ("an evaluation that returns a number", [('return {"accuracy": (net(X).sign() == Y.sign()).float().mean()}', "return 0.5")], "mine.py: evaluate_with: its function returned 0.5; it needs a dictionary"),
    ("an objective that is a word", [("(net(X).sign() == Y.sign()).float().mean()", '"good"')], "mine.py: evaluate_with: \"accuracy\" is 'good'; it must be one number"),
    ("an objective for each item", [(".float().mean()", ".float()")], 'mine.py: evaluate_with: "accuracy" is tensor'),
    ("an objective that is NaN", [(".float().mean()", ".float().mean() * float('nan')")], "accuracy is nan after 1 step"),
    ("a name that has a meaning", [('return {"accuracy"', 'return {"loss": 1.0, "accuracy"')], 'evaluate_with: "loss" has a meaning of its own; choose another name, "validation_loss"'),
    ("an array among the findings", [('return {"accuracy"', 'return {"per_class": torch.ones(2), "accuracy"')], r'mine.py: evaluate_with: "per_class" is tensor\(\[1., 1.\]\); allowed: '),
    ("a numpy array among the findings", [('return {"accuracy"', 'return {"per_class": X.numpy(), "accuracy"')], r'mine.py: evaluate_with: "per_class" is array'),
    ("NaN inside a finding", [('return {"accuracy"', 'return {"parts": {"a": [1.0, float("nan")]}, "accuracy"')], r"mine.py: evaluate_with: \"parts\" is \{'a': \[1.0, nan\]\}; allowed: "),
    ("a finding called time", [('return {"accuracy"', 'return {"time": 1.0, "accuracy"')], 'evaluate_with: "time" has a meaning of its own; choose another name, "validation_time"'),
    ("a finding called event", [('return {"accuracy"', 'return {"event": "x", "accuracy"')], 'evaluate_with: "event" has a meaning of its own'),
    ("a finding that looks like a part of the step", [('return {"accuracy"', 'return {"step_forward_s": 1.0, "accuracy"')], 'evaluate_with: "step_forward_s" has a meaning of its own'),
    ("a finding without a name", [('return {"accuracy"', 'return {3: 1.0, "accuracy"')], "evaluate_with: the key 3 is not allowed; allowed: a name"),
    ("an array among described facts", [("    trial.evaluate_with(", "    trial.describe_with(lambda: {'norms': X})\n    trial.evaluate_with(")], 'mine.py: describe_with: "norms" is tensor'),
    ("an evaluation that fails", [("net(X).sign()", "net(X[0, :2]).sign()")], "shapes"),
    ("no loop", [(LOOP, "    for x, y in []:\n")], r"mine.py: train\(trial\) never asked for a batch"),
    ("a loop that never steps", [("        trial.step(loss, optimizer)\n", "")], r"a batch was taken and trial.step\(loss, optimizer\) not called"),
    ("a loop that is left", [("        trial.step(loss, optimizer)\n", "        trial.step(loss, optimizer)\n        break\n")], r"mine.py: train\(trial\) left its loop after"),
    ("a pass that is not iterated", [(LOOP, "    loader = torch.utils.data.DataLoader(list(zip(X, Y)), 16)\n    for _, batches in tunediff.epochs(trial, loader):\n      for x, y in loader:\n"), ("trial.step(loss, optimizer)", "loss.backward(); optimizer.step()")], r"mine.py: train\(trial\): a pass of epochs\(trial, loader\) was not iterated"),
    ("two steps for one batch", [("        trial.step(loss, optimizer)\n", "        trial.step(loss, optimizer)\n        trial.step(F.mse_loss(net(x), y), optimizer)\n")], r"mine.py: trial.step was called twice for one batch"),
    ("a loss for each item", [("F.mse_loss(net(x), y)", "(net(x) - y)")], r"mine.py: trial.step takes a loss of one number, not a tensor of shape \[16, 1\]; loss.mean\(\)"),
    ("a loss that is a number", [("F.mse_loss(net(x), y)", "F.mse_loss(net(x), y).item()")], "mine.py: trial.step takes a loss of one number, not float"),
    ("no data", [("trial.batches((X, Y))", "trial.batches((X[:0], Y[:0]))")], "mine.py: trial.batches: the data set is empty"),
    ("tensors of two lengths", [("trial.batches((X, Y))", "trial.batches((X, Y[:9]))")], "trial.batches: tensors of different lengths: 64, 9"),
    ("data that is none", [("trial.batches((X, Y))", "trial.batches(3)")], "trial.batches: int is no data set; allowed: tensors, a torch Dataset"),
    ("a loader as data", [("trial.batches((X, Y))", "trial.batches(torch.utils.data.DataLoader(list(zip(X, Y))))")], r"a loader of your own goes to steps\(trial, loader\)"),
    ("another model is judged than exported", [("lambda: judge(net)", "lambda: judge(nn.Sequential(nn.Linear(4, 1)))")], "mine.py: the evaluation judges another model than the one that would be exported"),
    ("a second loop", [("        trial.step(loss, optimizer)\n", "        trial.step(loss, optimizer)\n    for x, y in trial.batches((X, Y)):\n        pass\n")], r"mine.py: train\(trial\) asked twice for batches"),
    ("a knob that there is not", [("trial.knobs.dropout", "trial.knobs.dropuot")], "dropuot"),
    ("a knob that torch refuses", [("dropout: float = 0.0", "dropout: float = 7.0")], r"ValueError: dropout probability .* \(mine.py, line \d+: nn.Linear"),
    ("a learning rate that torch refuses", [("trial.knobs.lr)", "-trial.knobs.lr)")], r"ValueError: Invalid learning rate: -0.01 \(mine.py, line \d+: optimizer = "),
    ("an error in the tenth line", [("loss = F.mse_loss(net(x), y)", "loss = F.mse_loss(net(x), y) + undefined")], r"mine.py: NameError: name 'undefined' is not defined \(mine.py, line \d+: loss = .* \+ undefined\)"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "answer"), [row[1:] for row in TRAINED], ids=[row[0] for row in TRAINED])
def test_mistakes_that_two_steps_and_an_evaluation_find(tmp_path, changes, answer):
    with pytest.raises(ConfigError, match=answer):
        checked(tmp_path, edited(*changes))


def test_a_file_without_mistakes_passes_and_a_knob_that_is_never_read_is_named(tmp_path):
    found = checked(tmp_path, edited(("nn.Dropout(trial.knobs.dropout)", "nn.Identity()")))
    assert found["unread"] == ["dropout"]
    assert found["parameters"] == 4 * 8 + 8 + 8 + 1
    assert 0 <= found["value"] <= 1
    assert checked(tmp_path, PLAIN, "good.py")["unread"] == []


@pytest.mark.parametrize(
    "average",
    ["copy.deepcopy(net)", "torch.optim.swa_utils.AveragedModel(net)", "pickle.loads(pickle.dumps(net))"],
    ids=["deepcopy", "AveragedModel", "pickle"],
)
def test_check_accepts_copies_of_the_prepared_model(tmp_path, average):
    text = edited(
        ("import torch\n", "import copy\nimport pickle\n\nimport torch\n"),
        (
            "    trial.keep(net=net,",
            f"    average = {average}\n    trial.export_model(average)\n    trial.keep(average=average, net=net,",
        ),
        ("judge(net))", "judge(average))"),
    )
    assert 0 <= checked(tmp_path, text)["value"] <= 1


# ----------------------------------------------------------------------------------- what is judged, saved and restored
SWAP = """

class Swap:
    def __init__(self, net, decay):
        self.net, self.decay = net, decay
        self.shadow = [p.detach().clone() for p in net.parameters()]

    def update(self):
        for mine, p in zip(self.shadow, self.net.parameters()):
            mine.lerp_(p.detach(), 1 - self.decay)

    def swap(self):
        for mine, p in zip(self.shadow, self.net.parameters()):
            was = p.detach().clone()
            p.data.copy_(mine)
            mine.copy_(was)

    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state):
        self.shadow = [one.clone() for one in state["shadow"]]


def judge_average(net, average):
    average.swap()
    found = judge(net)
    average.swap()
    return found
"""
AVERAGED = [
    ("    trial.keep(net=net,", "    average = Swap(net, 0.5)\n    trial.keep(average=average, net=net,"),
    ("judge(net))", "judge_average(net, average))"),
    ("        trial.step(loss, optimizer)\n", "        trial.step(loss, optimizer)\n        average.update()\n"),
]
STATEFUL = """

class History:
    def __init__(self):
        self.last = deque([1.0])

    def state_dict(self):
        return {"parts": [0, {"last": self.last}]}

    def load_state_dict(self, state):
        self.last = state["parts"][1]["last"]
"""
LAZY = """

class History:
    def __init__(self):
        self.buffers = {}

    def state_dict(self):
        return dict(self.buffers)

    def load_state_dict(self, state):
        for name in state:
            self.buffers[name] = self.buffers[name] * 0 + state[name]
"""
FORGOTTEN = [
    ("import torch\n", "import copy\n\nimport torch\n"),
    (
        "    trial.keep(net=net,",
        "    average = copy.deepcopy(net)\n    trial.export_model(average)\n    trial.keep(net=net,",
    ),
    ("judge(net))", "judge(average))"),
    (
        "        trial.step(loss, optimizer)\n",
        "        trial.step(loss, optimizer)\n        average[0].weight.data.lerp_(net[0].weight.data, 0.5)\n",
    ),
]
KEPT = ("    trial.keep(net=net,", "    trial.keep(history=History(), net=net,")
IMPORT = ("import torch\n", "from collections import deque\n\nimport torch\n")
ROUND_TRIP = [
    ("an average that is swapped in", SWAP, AVERAGED, r"mine.py: evaluate_with: judges other weights than those that are saved.*trial.export_model\(model\)"),
    ("an average that has not begun", SWAP, [*AVERAGED, ("Swap(net, 0.5)", "Swap(net, 1.0)")], "mine.py: evaluate_with: judges other weights than those that are saved"),
    ("an average that is not kept", "", FORGOTTEN, r"mine.py: a resumed training ends with other .*weights; trial.keep"),
    ("an optimizer that is not kept", "", [("optimizer=optimizer)", ")")], "mine.py: a resumed training ends with other weights; trial.keep"),
    ("a kept deque", STATEFUL, [KEPT, IMPORT], "checkpoint.pt cannot be read .*deque.*; a checkpoint holds tensors, numbers"),
    ("a kept array", STATEFUL, [KEPT, IMPORT, ("deque([1.0])", "X.numpy()")], "checkpoint.pt cannot be read .*numpy.*; a checkpoint holds tensors"),
    ("a state that cannot be restored", LAZY, [KEPT, ("        trial.step(loss, optimizer)\n", "        trial.step(loss, optimizer)\n        history.buffers['a'] = 1.0\n"), ("    trial.keep(history=History(),", "    history = History()\n    trial.keep(history=history,")], r"mine.py: a resumed training starts from the beginning: checkpoint.pt does not fit: .*KeyError: 'a'.*while history"),
    ("a part that is judged and not saved", "", [("    trial.keep(net=net,", "    head = nn.Linear(1, 1)\n    optimizer.add_param_group({'params': head.parameters(), 'lr': 1.0})\n    trial.keep(head=head, net=net,"), ("F.mse_loss(net(x), y)", "F.mse_loss(head(net(x)), y)"), ("judge(net))", "judge(net) | {'sum': head(net(X)).sum()})")], "mine.py: evaluate_with: sum of the saved weights differ from those in the training; trial.export_model"),
    ("a finding that a resume loses", "", [('return {"accuracy"', 'return {"calls": len(COUNT), "accuracy"'), ("        trial.step(loss, optimizer)\n", "        trial.step(loss, optimizer)\n        count.append(1)\n"), ("    trial.keep(net=net,", "    count = COUNT = []\n    globals().update(COUNT=count)\n    trial.keep(net=net,")], "mine.py: a resumed training ends with other calls; trial.keep"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "changes", "answer"), [row[1:] for row in ROUND_TRIP], ids=[r[0] for r in ROUND_TRIP])
def test_check_refuses_what_a_resume_or_evaluate_would_judge_otherwise(tmp_path, more, changes, answer):
    text = PLAIN + more
    for before, after in changes:
        assert before in text, before
        text = text.replace(before, after)
    with pytest.raises(ConfigError, match=answer):
        checked(tmp_path, text)


def test_an_error_is_told_with_the_users_own_line_and_without_our_frames(tmp_path):
    """Of the module in which it is raised."""
    file(tmp_path, "def loss_of(net, x):\n    return net(x).mean() + undefined\n", "loss_beside.py")
    text = edited(
        ("import torch\n", "import loss_beside\nimport torch\n"),
        ("F.mse_loss(net(x), y)", "loss_beside.loss_of(net, x)"),
    )
    with pytest.raises(ConfigError) as error:
        checked(tmp_path, text)
    first, *trace = str(error.value).splitlines()
    said = r"mine.py: NameError: name 'undefined' is not defined \(loss_beside.py, line 2: return .* \+ undefined\)"
    assert re.fullmatch(said, first)
    assert "mine.py" in trace[1]
    assert f"{Path(code.__file__).parent.parent}/" not in str(trace)
    with pytest.raises(ConfigError) as ours:
        cfg.baseline("gone.py")
    alone = ours.value.with_traceback(ours.tb.tb_next)
    assert f"{Path(code.__file__).parent.parent}/" in code.trace(alone), "no other frames"


def test_the_check_in_its_own_process(tmp_path):
    """What a search runs before it starts: a file that kills its process leaves this one as it is."""
    said, kills = [], edited(("trial.step(loss, optimizer)", "import os; os.kill(os.getpid(), 9)"))
    with pytest.raises(ConfigError, match=r"mine.py: its process died"):
        check.before_search(cfg.baseline(str(file(tmp_path, kills))), said.append)
    assert {line.partition(" for ")[0] for line in said} == {"checking mine.py: 2 steps and 2 evaluations"}


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("gone.py", "gone.py"), ("my.module", "my.module"), ("digit", "'digit'.*digits"), ("mine.py:huge", "'huge'.*large"),
        ("random.py", "module random"), ("yaml.py", "module yaml"),
    ],
)  # fmt: skip
def test_names(tmp_path, name, key, at_tmp_path):
    for made in ("mine.py", "random.py", "yaml.py"):
        file(tmp_path, PLAIN, made)
    with pytest.raises(ConfigError, match=key):
        cfg.baseline(name)


def test_knobs_of_our_evaluation_that_others_than_the_training_read_are_not_named(tmp_path):
    section = "    evaluation: Annotated[Evaluation, Fixed()] = field(default_factory=Evaluation)\n"
    changes = [
        ("import dataclass\n", "import dataclass, field\nfrom tunediff import Fixed\nfrom tunediff.evaluation.knobs import Evaluation\n"),
        ("    dropout: float = 0.0\n", "    dropout: float = 0.0\n" + section),
    ]  # fmt: skip
    sampling = edited(*changes) + "\n\ndef network(knobs): ...\n\n\ndef sample_images(network, config, request): ...\n"
    found = checked(tmp_path, sampling)
    assert found["unread"] == ["evaluation.images"], "tunediff.evaluate reads the others, the engine evaluation.points"


def test_knobs_that_do_nothing_beside_a_loader_of_ones_own_are_named(tmp_path):
    """A loader of its own beside knobs that then do nothing."""
    own = edited(
        ("trial.batches((X, Y))", "tunediff.steps(trial, [(X[:8], Y[:8])])"),
        ("        with trial.autocast():\n", "        if True:  # experiment.config is no knob\n"),
    )
    found = checked(tmp_path, own, "own.py")
    assert found["warnings"] == []
    assert {"loader.batch_size", "loader.workers", "precision.amp"} <= set(found["unread"])
    made = own.replace(
        "tunediff.steps(trial, [(X[:8], Y[:8])])",
        "tunediff.steps(trial, [(X[: trial.config.loader.batch_size], Y[:16])])",
    )
    unread = set(checked(tmp_path, made, "made.py")["unread"])
    assert {"loader.workers", "precision.amp"} <= unread
    assert "loader.batch_size" not in unread


STEP = "        trial.step(loss, optimizer)\n"
PREPARED = "    net = trial.prepare(net)\n"
FIXED_SEED = "torch.Generator().manual_seed(1)"
NET = """

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.last, self.first = nn.Linear(8, 1), nn.Linear(4, 8)

    def forward(self, x):
        return self.last(F.dropout(self.first(x), 0.5, self.training))
"""
WARNED = [
    ("weights that are changed after the last evaluation", [(STEP, STEP + "    nn.init.ones_(net[0].bias)\n")], r"changes weights \(0.bias\) after the last evaluation"),
    ("optimizer steps before the first batch", [(LOOP, "    for _ in range(3):\n        judge(net)\n        optimizer.step()\n" + LOOP)], r"optimizer steps before its first batch \(3\)"),
    ("an evaluation that cannot be repeated", [("import torch\n", "import random\n\nimport torch\n\nchance = random.SystemRandom().random\n"), (".float().mean()}", ".float().mean() + chance(), 'own_s': chance()}")], "^accuracy differ when a run is repeated with the same seed: its randomness is part of every comparison$"),
    ("a seed of its own", [("    net = nn.Sequential(", "    torch.manual_seed(1)\n    net = nn.Sequential(")], "the knob seed does not change the initial weights"),
    ("private initial weights", [(PREPARED, f"    own = {FIXED_SEED}\n    for p in net.parameters():\n        nn.init.normal_(p, generator=own)\n{PREPARED}")], "the initial weights are the same for two values of the knob seed"),
    ("a loader in a fixed order", [("trial.batches((X, Y))", "tunediff.steps(trial, [(X[:8], Y[:8]), (X[8:], Y[8:])])")], "the first batches are the same for two values of the knob seed"),
    # what is no fault
    ("a split of the data", [(PREPARED, f"    torch.rand(3, generator={FIXED_SEED})\n{PREPARED}")], ""),
    ("private draws in the evaluation", [("    return {", f"    torch.rand(3, generator={FIXED_SEED})\n    return {{")], ""),
    ("seeded draws in the evaluation", [("import torch\n", "import random\n\nimport numpy as np\nimport torch\n"), (".float().mean()}", ".float().mean() + torch.rand(()) + np.random.rand() + random.random()}")], ""),
    ("the trial's generator", [("F.mse_loss(net(x), y)", "F.mse_loss(net(x + torch.rand(x.shape, generator=trial.rng)), y)")], ""),
    ("a shuffling loader", [("trial.batches((X, Y))", "tunediff.steps(trial, torch.utils.data.DataLoader(list(zip(X, Y)), 8, shuffle=True))")], ""),
    ("a counter", [(LOOP, "    for _ in tunediff.steps(trial, range(99), samples=8):\n        x, y = (own[torch.randint(64, (8,))] for own in (X, Y))\n")], ""),
    ("a learning rate of numpy", [("import torch\n", "import numpy as np\nimport torch\n"), (STEP, "        optimizer.param_groups[0]['lr'] = 0.01 * (1 + np.cos(np.pi * trial.progress))\n" + STEP)], ""),
    # as trainings do: else its dropout would be on in the first evaluation and off after a resume
    ("a dropout by self.training", [("def train(", NET.strip() + "\n\n\ndef train("), (PREPARED, "    net = trial.prepare(Net())\n"), ("float().mean()}", "float().mean(), 'sum': net(X).sum()}")], ""),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "answer"), [row[1:] for row in WARNED], ids=[row[0] for row in WARNED])
def test_check_warns_of_what_may_be_meant_and_of_nothing_else(tmp_path, changes, answer):
    warnings = checked(tmp_path, edited(*changes))["warnings"]
    assert len(warnings) == bool(answer)
    assert re.search(answer, "".join(warnings))


def test_check_leaves_out_further_runs_that_would_take_long(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "MOST_S", -1.0)
    (warning,) = checked(tmp_path, PLAIN)["warnings"]
    assert "was not checked" in warning


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        ([(STEP, f"{STEP}        with torch.no_grad():\n            net.module[0].weight += trial.world.rank\n")],
         "two ranks have learned different models"),
        ([("trial.batches((X, Y))", "tunediff.steps(trial, [(X[:8], Y[:8])])")], "all ranks train the same batches"),
    ],
    ids=["each changes the model by itself", "the same batches"],
)  # fmt: skip
def test_two_ranks_are_tried_and_disagree(tmp_path, changes, answer):
    config = cfg.override(cfg.baseline(str(file(tmp_path, edited(*changes)))), {"parallel.workers": 2})
    try:
        said = check.before_search(config, lambda _: None)["warnings"]
    except ConfigError as error:
        said = [str(error)]
    assert answer in "".join(said)
