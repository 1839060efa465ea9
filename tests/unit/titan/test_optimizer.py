"""[optimizer]: settings that parameter groups share."""

import dataclasses
import re

import pytest
import torch
from torch import nn

from graph_trainer.errors import ConfigError
from graph_trainer.titan.config.load import load_config
from graph_trainer.titan.optimizer import ParameterGroup, with_shared_settings

# graph_trainer binds the device before torchtitan does
from torchtitan.components import optimizer as titan  # isort: skip

GROUPS = """\
[optimizer]
lr = 1e-3
[[optimizer.param_groups]]
pattern = "norm"
optimizer_kwargs = { weight_decay = 0.0, lr = 5e-4 }
[[optimizer.param_groups]]
pattern = ".*"
optimizer_name = "Adam"
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my.toml"
    path.write_text(f'base = "llama3_debugmodel"\n{GROUPS}')
    return str(path)


def test_flags_set_every_group_that_sets_no_own_and_the_rest_is_the_bases(file):
    flags = ["--optimizer.lr", "3e-3", "--optimizer.betas", "[0.8, 0.9]"]
    norms, others = load_config(["--config", file, *flags]).optimizer.resolved_groups()
    shared = {"betas": (0.8, 0.9), "eps": 1e-8}
    assert norms.optimizer_kwargs == {"lr": 5e-4, "weight_decay": 0.0, **shared}
    assert others.optimizer_kwargs == {"lr": 3e-3, "weight_decay": 0.1, **shared}
    # without flags: the file's rate, and the base's betas, which no group names
    _, others = load_config(["--config", file]).optimizer.resolved_groups()
    assert others.optimizer_kwargs["lr"] == 1e-3
    assert others.optimizer_kwargs["betas"] == (0.9, 0.95)


def test_what_is_resolved_is_what_trains(file):
    model = nn.ModuleDict({"norm": nn.LayerNorm(4), "up": nn.Linear(4, 4)})
    flags = ["--optimizer.eps", "1e-6", "--optimizer.implementation", "for-loop"]
    container = load_config(["--config", file, *flags]).optimizer.build(model_parts=[model])
    by_type = {type(each): each.param_groups for each in container.optimizers}
    (norms,), (others,) = by_type[torch.optim.AdamW], by_type[torch.optim.Adam]
    assert (norms["lr"], others["lr"], others["eps"]) == (5e-4, 1e-3, 1e-6)


@pytest.mark.parametrize("size", ["llama3.debugmodel", "qwen3.8b", "deepseek_v3.16b"])
def test_a_config_and_its_base_train_with_the_same_optimizer(size, tmp_path):
    module, name = size.split(".")
    config = load_config(["--module", module, "--config", name])
    path = tmp_path / "base.toml"
    path.write_text(f'module = "{config.module}"\nbase = "{config.base}"\n')
    assert load_config(["--config", str(path)]).optimizer == config.optimizer


def test_groups_that_differ_keep_what_is_theirs():
    def group(**kwargs):
        return titan.ParamGroupConfig(pattern="x", optimizer_name="AdamW", optimizer_kwargs=kwargs)

    groups = [group(lr=1e-3, eps=1e-8), group(lr=2e-3, eps=1e-8)]
    groups.append(titan.ParamGroupConfig(pattern="y", optimizer_name="DistMuon"))
    given = titan.OptimizersContainer.Config(param_groups=groups)
    shared = with_shared_settings(given)
    assert shared.shared() == {"eps": 1e-8}  # which DistMuon has another default of
    resolved = [dataclasses.astuple(each) for each in shared.resolved_groups()]
    assert resolved == [dataclasses.astuple(each) for each in groups]
    assert with_shared_settings(shared) is shared


def test_an_optimizer_set_in_python_trains_as_it_was_set():
    config = load_config([])
    given = titan.default_adamw(lr=7e-4, amsgrad=True)
    config = dataclasses.replace(config, optimizer=given)
    assert config.optimizer.lr == 7e-4
    (resolved,), (group,) = config.optimizer.resolved_groups(), given.param_groups
    assert dataclasses.astuple(resolved) == dataclasses.astuple(group)


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        (["norm"], "a group before it finds up.weight and 1 more, which would not be trained"),
        (["up", "norm.w"], "[1].pattern: neither it nor a group before it finds norm.bias, which"),
        ([".*", "norm"], "[1].pattern: it finds none of the parameters that the groups"),
    ],
)
def test_every_parameter_has_a_group_and_every_group_a_parameter(patterns, said):
    model = nn.ModuleDict({"norm": nn.LayerNorm(4), "up": nn.Linear(4, 4)})
    config = load_config([]).optimizer
    config.param_groups = [ParameterGroup(pattern=each) for each in patterns]
    with pytest.raises(ConfigError, match=re.escape(said)):
        config.build(model_parts=[model])


def test_a_parameter_that_is_not_trained_needs_no_group():
    model = nn.ModuleDict({"norm": nn.LayerNorm(4), "up": nn.Linear(4, 4).requires_grad_(False)})
    config = load_config([]).optimizer
    config.param_groups = [ParameterGroup(pattern="norm")]
    (optimizer,) = config.build(model_parts=[model]).optimizers
    assert len(optimizer.param_groups[0]["params"]) == 2


@pytest.mark.parametrize(("patterns", "wrong"), [(["norm"], 0), ([".*", "norm"], 1)])
def test_a_config_with_such_groups_is_refused_with_its_place(tmp_path, patterns, wrong):
    path = tmp_path / "groups.toml"
    groups = [f'[[optimizer.param_groups]]\npattern = "{each}"\n' for each in patterns]
    path.write_text("".join(['base = "llama3_debugmodel"\n', *groups]))
    with pytest.raises(ConfigError) as caught:
        load_config(["--config", str(path)])
    said = f'{path}: optimizer.param_groups[{wrong}].pattern = "norm": '
    assert str(caught.value).startswith(said) and len(str(caught.value).splitlines()) == 1
