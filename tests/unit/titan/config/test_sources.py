"""Names, precedence, what the entries hold, and the way to TOML and back."""

import dataclasses
import re
import shutil
import sys
import tomllib
import types
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from graph_trainer.core import shipped_configs
from graph_trainer.errors import ConfigError
from graph_trainer.titan.config.build import merge
from graph_trainer.titan.config.check import check_config
from graph_trainer.titan.config.config_names import find_config
from graph_trainer.titan.config.load import load_config
from graph_trainer.titan.config.run_config import (
    GraphTrainerConfig,
    to_graph_trainer_config,
)
from graph_trainer.titan.config.sources import COMMAND_LINE, Origins
from graph_trainer.titan.config.write_toml import config_to_toml, save_resolved_config
from tests.examples import examples

ROOT = Path(__file__).resolve().parents[4]
SIZES = ("debugmodel", "405b")
CONFIGS = sorted(
    (path.parent.name, path.stem)
    for path in (ROOT / "configs").glob("*/*.toml")
    if path.parent.name not in ("hardware", "transformers")
)
FAMILIES = ("deepseek_v3", "llama3", "qwen3")
IN_BASES = str.maketrans(".-", "__")
"""The base of 30b-a3b.toml is a function, qwen3_30b_a3b."""


def without_model(config):
    # Two model configs never compare equal: they hold partial functions.
    return dataclasses.replace(config, model_spec=None)


def reload(config, folder):
    path = folder / "resolved.toml"
    path.write_text(config_to_toml(config), encoding="utf-8")
    return load_config(["--config", str(path)])


@pytest.mark.parametrize(("family", "size"), CONFIGS)
def test_every_config_is_a_model_graph_trainer_can_shard(family, size):
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

    from graph_trainer.titan.parallelize import parallelize_decoder

    config = load_config(["--module", f"graph_trainer.{family}", "--config", size])
    spec = config.model_spec
    assert type(config) is GraphTrainerConfig
    assert config.base == f"{family}_{size}".translate(IN_BASES)
    assert spec.flavor.lower() == size
    assert spec.parallelize_fn is parallelize_decoder
    assert spec.state_dict_adapter is not None
    attention = [c for _, c, _, _ in spec.model.traverse(ScaledDotProductAttention.Config)]
    assert len(attention) == len(spec.model.layers)
    assert not list(spec.model.traverse(FlexAttention.Config))
    assert config.parallelism.spmd_backend == "partial_dtensor"
    assert config.training.disable_cuda_graphs
    assert not config.compile.enable
    assert config.loss.build(compile_config=config.compile) is not None


@pytest.mark.parametrize("family", FAMILIES)
def test_every_base_has_a_file_and_every_file_a_base(family):
    from graph_trainer.titan.config.sources import registry_functions, registry_module

    bases = registry_functions(registry_module(f"graph_trainer.{family}"))
    files = [f"{name}_{size}".translate(IN_BASES) for name, size in CONFIGS if name == family]
    assert files and set(files) == set(bases)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("graph_trainer.llama3", "8b"),
        ("llama3", "llama3_8b"),
        ("graph_trainer.llama3", "graph_trainer_llama3_8b"),
        ("llama3", str(ROOT / "configs/llama3/8b.toml")),
    ],
)
def test_all_names_of_a_config_are_the_same_config(module, name):
    config = load_config(["--module", module, f"--config={name}"])
    assert without_model(config) == without_model(load_config(["--config", "8b"]))
    assert config.module == "graph_trainer.llama3"


def test_installed_configs_come_before_a_checkouts(tmp_path, monkeypatch):
    installed = tmp_path / "graph_trainer"
    monkeypatch.setattr(shipped_configs, "_PACKAGE", installed)
    for place in (installed, tmp_path):
        shutil.copytree(ROOT / "configs", place / "configs")
    assert find_config("graph_trainer.llama3", "8b", list) == installed / "configs/llama3/8b.toml"
    folders = [place / "configs/llama3" for place in (installed, tmp_path)]
    assert shipped_configs.config_folders("llama3") == folders


def test_flags_beat_file_beats_base_beats_defaults(tmp_path):
    base = load_config(["--config", "debugmodel"])
    file = tmp_path / "mine.toml"
    file.write_text(
        'base = "llama3_debugmodel"\n[training]\nsteps = 11\nseq_len = 128\n'
        '[dataloader]\ntype = "text"\nseed = 4\n[compile]\nmax_graphs = 3\n'
    )
    config = load_config(
        ["--config", str(file), "--training.steps", "12", "--dataloader.seed", "5"]
    )
    assert config.training.steps == 12  # flag over file
    assert config.dataloader.seed == 5
    assert config.training.seq_len == 128  # file over base
    assert config.compile.max_graphs == 3
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    entry = llama3_debugmodel()
    assert config.training.local_batch_size == entry.training.local_batch_size  # base
    assert config.lr_scheduler.warmup_steps == 2 != type(entry.lr_scheduler)().warmup_steps
    assert config.compile.mode == base.compile.mode == "aot_fx_trace"  # default


def test_a_files_table_replaces_the_one_before_and_flags_change_keys_in_it():
    entry = {"type": dict, "kwargs": {"a": 1, "b": 2}}
    origins = Origins("x.toml")
    merged = merge(entry, {"kwargs": {"a": 3}}, "x.toml", origins)
    assert merged["kwargs"] == {"a": 3} and origins.of("kwargs.a") == "x.toml"
    assert merge(merged, {"kwargs": {"b": 4}}, COMMAND_LINE, origins)["kwargs"] == {"a": 3, "b": 4}
    assert origins.of("kwargs") == COMMAND_LINE and origins.of("other") == ""


def test_flags_take_dashes_or_underscores_and_negation():
    config = load_config(
        [
            "--training.local-batch-size=2",
            "--metrics.no-enable-tensorboard",
            "--parallelism.fsdp_reshard_after_forward",
            "always",
            "--compile.passes",
            "default",
            "--debug.seed",
            "3",
        ]
    )
    assert config.training.local_batch_size == 2
    assert config.parallelism.fsdp_reshard_after_forward == "always"
    assert config.compile.passes == ["default"]
    assert config.debug.seed == 3


def test_flags_follow_toml_and_their_field():
    flags = {
        "compile.passes": '["default", "overlap_fsdp"]',
        "compile.disable_passes": "[]",
        "checkpoint.enable": "true",
        "checkpoint.folder": "2024",
        "compile.memory_limit_gib": "8",
        "debug.seed": "None",
        "lr_scheduler.min_lr_factor": "1e-1",
        "override.imports": '["a.b", ["c.d", {x = 1}]]',
        "optimizer.param_groups.0.optimizer_kwargs.lr": "1e-3",
        "optimizer.param_groups.0.optimizer_kwargs.betas": "[0.8, 0.9]",
    }
    before = load_config([]).optimizer.param_groups
    config = load_config([word for key, text in flags.items() for word in (f"--{key}", text)])
    assert config.compile.passes == ["default", "overlap_fsdp"]
    assert config.compile.disable_passes == []
    assert config.checkpoint.enable is True and config.checkpoint.folder == "2024"
    limit = config.compile.memory_limit_gib
    assert type(limit) is float and limit == 8 and config.debug.seed is None
    assert config.lr_scheduler.min_lr_factor == 0.1
    assert config.override.imports == ["a.b", ("c.d", {"x": 1})]
    (group,) = config.optimizer.param_groups
    assert (
        group.optimizer_kwargs == {"lr": 1e-3, "betas": (0.8, 0.9)}
        and group.pattern == before[0].pattern
    )


OWN = """\
from graph_trainer.llama3 import config_registry
from graph_trainer.titan.trainer import GraphTrainer

def small(){returns}:
    return config_registry.llama3_debugmodel()
"""


@pytest.fixture
def own_package(tmp_path, monkeypatch):
    """Make a package of configs in a folder and go there; a module is imported once."""

    def make(name, returns):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config_registry.py").write_text(OWN.format(returns=returns))
        monkeypatch.chdir(tmp_path / name)

    monkeypatch.setattr(sys, "path", [*sys.path])
    return make


def test_a_package_of_ones_own_is_found_from_inside_its_folder(own_package):
    own_package("myllama", " -> GraphTrainer.Config")
    config = load_config(["--module", "myllama", "--config", "small"])
    assert (config.module, config.base) == ("myllama", "small")


def test_a_module_without_entries_is_told_what_one_is(own_package):
    own_package("mygpt", "")
    with pytest.raises(ConfigError, match=r"mygpt.config_registry has no config: .*small\(\) ->"):
        load_config(["--module", "mygpt", "--config", "small"])


@pytest.mark.parametrize(("name", "guess"), [("mylama", "myllama"), ("lama3", "llama3")])
def test_a_misspelt_module_of_ones_own_or_of_ours_is_guessed(own_package, monkeypatch, name, guess):
    own_package("myllama", " -> GraphTrainer.Config")
    monkeypatch.chdir("..")
    with pytest.raises(ConfigError, match=rf"no such module of configs. Did you mean {guess}\?"):
        load_config(["--module", name, "--config", "small"])


def test_type_flags_choose_components():
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

    config = load_config(
        ["--activation_checkpoint.type", "full", "--dataloader.type=huggingface"]
        + ["--dataloader.dataset", "c4", "--activation_checkpoint.no-preserve_rng_state"]
        + ["--tokenizer.dataset", "stdlib"]
    )
    assert type(config.activation_checkpoint) is FullAC.Config
    assert not config.activation_checkpoint.preserve_rng_state
    assert type(config.dataloader) is HuggingFaceTextDataLoader.Config
    assert config.dataloader.dataset == "c4"
    # torchtitan's own spelling of the same choice
    torchtitan_way = load_config(["activation-checkpoint:selective"])
    assert type(torchtitan_way.activation_checkpoint) is SelectiveAC.Config
    assert load_config(["--config", "8b", "--activation_checkpoint.type", "none"]) is not None


def test_a_type_of_ones_own_is_named_by_its_class(tmp_path, monkeypatch):
    module = types.ModuleType("my_components")
    source = (
        "from dataclasses import dataclass\n"
        "from graph_trainer.titan.data.loader import TextDataLoader\n"
        "class Mine(TextDataLoader):\n"
        "    @dataclass(kw_only=True, slots=True)\n"
        "    class Config(TextDataLoader.Config):\n"
        "        extra: int = 1\n"
    )
    monkeypatch.setitem(sys.modules, "my_components", module)
    exec(source, module.__dict__)
    config = load_config(["--dataloader.type", "my_components:Mine.Config", "--dataloader.extra=7"])
    assert type(config.dataloader) is module.Mine.Config and config.dataloader.extra == 7
    again = reload(config, tmp_path)
    assert type(again.dataloader) is module.Mine.Config and again.dataloader.extra == 7


def test_another_type_starts_from_its_own_defaults_and_the_same_one_merges(tmp_path):
    file = tmp_path / "a.toml"
    head = 'base = "llama3_debugmodel"\n'
    file.write_text(head + '[validator.dataloader]\ntype = "text"\nseed = 2\n')
    assert load_config(["--config", str(file)]).validator.dataloader.split == "validation"
    file.write_text(head + '[validator.dataloader]\ntype = "huggingface"\n')
    assert load_config(["--config", str(file)]).validator.dataloader.dataset == "c4_test"


def test_a_registry_function_without_a_file_is_a_config(tmp_path, monkeypatch):
    """A model of one's own needs a registry module, and torchtitan's are ones already."""
    config = load_config(["--module", "torchtitan.models.llama3", "--config", "llama3_debugmodel"])
    assert type(config) is GraphTrainerConfig
    assert (config.module, config.base) == ("torchtitan.models.llama3", "llama3_debugmodel")
    again = reload(config, tmp_path)
    assert without_model(again) == without_model(config)


def test_conversion_leaves_its_argument_alone():
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    original = llama3_debugmodel()
    to_graph_trainer_config(original)
    assert list(original.model_spec.model.traverse(FlexAttention.Config))
    assert not original.training.disable_cuda_graphs
    assert original.parallelism.spmd_backend == "spmd_types"


def test_the_loss_is_the_models_own_unless_it_works_in_chunks(tmp_path):
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.models.deepseek_v3.mtp import MTPLoss

    words = ["--module", "torchtitan.models.deepseek_v3", "--config"]
    chunked = load_config([*words, "deepseek_v3_debugmodel"])
    assert type(chunked.loss) is CrossEntropyLoss.Config and chunked.replaces_chunked_loss
    several = load_config([*words, "deepseek_v3_debugmodel_mtp", "--loss.mtp_scale", "0.5"])
    assert type(several.loss) is MTPLoss.Config and not several.replaces_chunked_loss
    assert several.loss.mtp_scale == 0.5 and several.loss.global_vocab_size == 2048
    assert without_model(reload(several, tmp_path)) == without_model(several)


@pytest.mark.parametrize("size", SIZES)
def test_the_resolved_config_gives_the_config_back(size, tmp_path):
    config = load_config(["--config", size, "--training.steps", "7"])
    again = reload(config, tmp_path)
    assert without_model(again) == without_model(config)
    assert again.model_spec.flavor == config.model_spec.flavor
    assert config_to_toml(again) == config_to_toml(config)


TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
FLOATS = st.floats(min_value=1e-30, max_value=1e30)
FREE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | FLOATS | TEXT,
    lambda inner: st.dictionaries(TEXT.filter(lambda k: k != "unset"), inner, max_size=3),
    max_leaves=6,
)


@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_survives_the_way_to_toml_and_back(data, tmp_path):
    from graph_trainer.titan.optimizer import ParameterGroup

    draw = data.draw
    config = load_config([])
    config.dump_folder = draw(
        TEXT.filter(lambda t: t.strip() and "\0" not in t and not Path("/x", t).is_file())
    )
    config.debug.seed = draw(st.none() | st.integers(0, 2**63))
    config.debug.save_config_file = draw(st.none() | st.just("none") | TEXT)
    config.lr_scheduler.decay_ratio = draw(st.none() | st.floats(0, 1))
    config.parallelism.context_parallel_load_balancer = draw(st.none() | st.just("headtail"))
    config.parallelism.module_fqns_per_model_part = draw(
        st.none() | st.lists(st.lists(TEXT, max_size=2), max_size=2)
    )
    config.training.max_norm = draw(FLOATS | st.just(float("inf")) | st.integers(1, 9))
    config.optimizer.param_groups = [
        ParameterGroup(
            pattern=f"{found}|(?!){re.escape(draw(TEXT))}",  # what follows (?!) finds nothing
            optimizer_name=draw(st.sampled_from(["Adam", "AdamW"])),
            optimizer_kwargs={
                "lr": draw(FLOATS),
                "betas": (draw(st.floats(0, 0.99)), 0.5),
                "amsgrad": draw(st.booleans()),
            },
        )
        for found in ("norm", ".*")[-draw(st.integers(1, 2)) :]
    ]
    words = TEXT.filter(lambda k: k != "unset")
    config.optimizer.optimizer_factory_kwargs_by_name = draw(
        st.dictionaries(words, st.dictionaries(words, FREE, max_size=3), max_size=2)
    )
    config.override.imports = draw(
        st.lists(TEXT | st.tuples(TEXT, st.dictionaries(TEXT, FLOATS, max_size=2)), max_size=2)
    )
    again = reload(config, tmp_path)
    assert without_model(again) == without_model(config)


def test_what_toml_cannot_say_is_listed_and_comes_from_base(tmp_path):
    config = load_config([])
    config.override.imports = [object()]
    text = config_to_toml(config)
    assert "override.imports" in text.splitlines()[1]
    assert reload(config, tmp_path).override.imports == []


def test_saving_makes_the_folder_and_refuses_a_file_in_its_place(tmp_path):
    config = load_config([])
    path = tmp_path / "new" / "run" / "config.toml"
    save_resolved_config(config, path.parent)
    assert tomllib.loads(path.read_text())["base"] == "llama3_debugmodel"
    with pytest.raises(ConfigError, match="dump_folder"):
        save_resolved_config(config, path)


RANKS = {"debugmodel": 2, "debugmodel_moe": 2, "70b": 256, "405b": 512, "671b": 1024}


@pytest.mark.parametrize(("family", "size"), CONFIGS)
def test_the_configs_hold_no_absolute_paths_and_resolve_on_their_own_mesh(family, size):
    text = (ROOT / f"configs/{family}/{size}.toml").read_text()
    assert '"/' not in text
    module = f"graph_trainer.{family}"
    check_config(load_config(["--module", module, "--config", size]), RANKS.get(size, 8))
