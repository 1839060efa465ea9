"""[optimizer]: settings that parameter groups share."""

import dataclasses

import pytest
import torch
from torch import nn

from graph_trainer.titan.config.load import load_config
from graph_trainer.titan.optimizer import with_shared_settings

# graph_trainer binds the device before torchtitan does
from torchtitan.components import optimizer as titan  # isort: skip

GROUPS = """\
[optimizer]
lr = 1e-3
[[optimizer.param_groups]]
pattern = "norm"
optimizer_name = "AdamW"
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
    assert shared.resolved_groups() == groups == given.param_groups
    assert with_shared_settings(shared) is shared


def test_an_optimizer_set_in_python_trains_as_it_was_set():
    config = load_config([])
    given = titan.default_adamw(lr=7e-4, amsgrad=True)
    config = dataclasses.replace(config, optimizer=given)
    assert config.optimizer.lr == 7e-4
    assert config.optimizer.resolved_groups() == given.param_groups
