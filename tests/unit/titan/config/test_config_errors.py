"""Every kind of bad input: one ConfigError with the place, the key, the value and a remedy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graph_trainer.errors import ConfigError, GraphTrainerError
from graph_trainer.titan.config.build import build_config
from graph_trainer.titan.config.check import check_config
from graph_trainer.titan.config.load import load_config, merge, table_of
from graph_trainer.titan.config.sources import Origins, Problem, refusal, with_none
from graph_trainer.titan.config.toml_file import read_toml
from tests.examples import examples
from tests.unit.titan.config.bad_input import IN_FILES, ON_THE_COMMAND_LINE

BASE = 'base = "llama3_debugmodel"\n'


def refused(argv, world_size=None):
    with pytest.raises(ConfigError) as caught:
        load_config(argv, world_size=world_size)
    return str(caught.value)


def shortly(bad):
    return bad.said[:60]


@pytest.mark.parametrize("bad", IN_FILES, ids=shortly)
def test_a_bad_file_is_one_error_that_names_file_key_value_and_remedy(bad, tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text(BASE + bad.text + "\n")
    message = refused(["--config", str(path)])
    assert message.startswith(f"{path}: ")
    assert bad.said in message and bad.remedy in message, message


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ("[training]\nsteps = ten\n", "  3 | steps = ten", 9),
        ("[training\nsteps = 1\n", "  2 | [training", 10),
        ("a = 1\na = 2\n", "  3 | a = 2", 6),
        ('x = "abc\n', '  2 | x = "abc', 9),
    ],
)
def test_a_syntax_error_shows_its_line_with_a_caret(text, line, column, tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text(BASE + text)
    message = refused(["--config", str(path)])
    assert str(path) in message and "not valid TOML" in message and "key = value" in message
    shown, caret = message.splitlines()[1:3]
    assert shown == line
    assert caret.index("^") - len("  1 | ") + 1 == column


def test_a_tab_in_front_of_the_caret_stays_a_tab(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text("\tsteps = ten\n")
    caret = refused(["--config", str(path)]).splitlines()[2]
    assert caret == "      \t        ^"


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe",
        b"a = " + b"[" * 3000,
        b".".join([b"a"] * 20_000) + b" = 1",
        b"training.steps = " + b"9" * 5000,
        b"lr_scheduler.min_lr_factor = 1e" + b"9" * 5000,
        b"a = 1979-05-27T00:00:00+99:99",
        b'a = "\\ud800"',
        b"a = 1\rb = 2",
    ],
    ids=lambda content: content[:30],
)
def test_a_file_that_is_no_text_or_holds_the_endless_is_refused(content, tmp_path):
    path = tmp_path / "bad.toml"
    path.write_bytes(BASE.encode() + content)
    message = refused(["--config", str(path)])
    assert str(path) in message and len(message) < 10_000


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path):
    path = tmp_path / "good.toml"
    path.write_text(BASE, encoding="utf-8-sig")
    assert load_config(["--config", str(path)]).base == "llama3_debugmodel"


def test_a_file_that_is_not_there_is_guessed_by_its_name_without_toml(tmp_path):
    for name in ("nobase.toml", "old.toml"):
        (tmp_path / name).write_text("")
    message = refused(["--config", str(tmp_path / "nothing.toml")])
    assert "no such file. TOML files there: nobase.toml, old.toml." in message
    assert "Did you mean nobase.toml? " in refused(["--config", str(tmp_path / "nobas.toml")])


def test_a_file_without_base_and_a_folder_are_refused(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text("[training]\nsteps = 1\n")
    message = refused(["--config", str(path)])
    assert "no base, which names the model. Write" in message and "llama3_debugmodel" in message
    path.write_text('base = "llama3_debug"\n')
    message = refused(["--config", str(path)])
    assert '"llama3_debug"' in message and "Did you mean llama3_debugmodel" in message
    assert "cannot be read" in refused(["--config", str(tmp_path) + "/"])


@pytest.mark.parametrize("bad", ON_THE_COMMAND_LINE, ids=shortly)
def test_bad_flags_are_one_error_that_names_key_value_and_remedy(bad, capsys):
    message = refused(bad.flags)
    assert bad.said in message and bad.remedy in message, message
    assert "╭" not in message and "\n" not in message
    assert capsys.readouterr() == ("", "")


def test_all_mistakes_of_a_file_and_of_the_flags_are_in_one_error(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text(
        f"{BASE}trainning = 3\n[training]\nsteps = 'ten'\nseq_len = true\n[debug]\nseeed = 1\n"
        "[checkpoint]\ninterval = 0\n[[optimizer.param_groups]]\npatern = 1\n"
    )
    message = refused(["--config", str(path), "--debug.seed", "x", "--training.stepz", "3"])
    keys = ["trainning", "training.steps", "training.seq_len", "debug.seeed", "checkpoint.interval"]
    keys += ["optimizer.param_groups[0].patern", "optimizer.param_groups[0]"]
    expected = {f"{path}: {key}" for key in keys}
    expected |= {"command line: debug.seed", "command line: training.stepz"}
    assert {line.split(" = ")[0] for line in message.splitlines()} == expected


def test_all_values_out_of_bounds_are_in_one_error(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text(f"{BASE}[training]\nsteps = 0\ndisable_cuda_graphs = false\n")
    lines = refused(["--config", str(path), "--debug.seed=-1"]).splitlines()
    assert {line.partition(": ")[2].split(": ")[0] for line in lines} == {
        "training.steps = 0",
        "debug.seed = -1",
        "training.disable_cuda_graphs = false",
    }


@pytest.mark.parametrize(
    ("flags", "ranks", "named"),
    [
        ({"data_parallel_shard": 3}, 2, ["data_parallel_shard_degree = 3", "2 are started", "-1"]),
        ({"tensor_parallel": 4}, 2, ["tensor_parallel_degree = 4: does not divide 2 ranks."]),
        ({"tensor_parallel": 4}, 6, ["tensor_parallel_degree = 4", "6 ranks", "multiple of 4"]),
        (
            {"tensor_parallel": 2, "context_parallel": 2},
            6,
            ["tensor_parallel_degree = 2: times context_parallel_degree 2 = 4, which does not"],
        ),
        ({"data_parallel_replicate": 2, "data_parallel_shard": 2}, 8, ["= 4 ranks", "8 are"]),
        ({"data_parallel_replicate": 2, "data_parallel_shard": 0}, 2, ["shard_degree", "0", "-1"]),
    ],
)
def test_a_mesh_that_does_not_fit_the_ranks_is_refused(flags, ranks, named):
    argv = [f"--parallelism.{k}_degree={v}" for k, v in flags.items()]
    message = refused(argv, world_size=ranks)
    for part in ["command line", *named]:
        assert part in message, message


@pytest.mark.parametrize(
    ("degrees", "ranks"),
    [((1, -1, 1), 2), ((1, -1, 2), 8), ((2, 2, 2), 8), ((4, 1, 1), 4), ((2, -1, 1), 6)],
)
def test_a_mesh_that_fits_is_taken(degrees, ranks):
    names = ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel")
    argv = [f"--parallelism.{n}_degree={d}" for n, d in zip(names, degrees, strict=True)]
    load_config(argv, world_size=ranks)


def test_the_global_batch_is_a_multiple_of_one_micro_batch_on_every_rank():
    argv = ["--training.local_batch_size", "4", "--training.global_batch_size"]
    load_config([*argv, "16"], world_size=2)
    message = refused([*argv, "12"], world_size=2)
    for part in ("training.global_batch_size = 12", "multiple of 8", "8 or 16", "-1 for 8"):
        assert part in message
    load_config([*argv, "12"], world_size=None)  # unknown ranks: nothing to compare with


def test_sequences_need_not_divide_without_sequence_parallelism():
    argv = ["--training.seq_len=255", "--parallelism.tensor_parallel_degree=2"]
    assert "enable_sequence_parallel = false" in refused(argv)
    load_config([*argv, "--parallelism.no-enable_sequence_parallel"])


def test_heads_that_do_not_divide_are_said_before_sequences():
    heads, lengths = refused(["--parallelism.tensor_parallel_degree=3"]).splitlines()
    assert "n_heads = 16" in heads and "training.seq_len = 256" in lengths


def test_an_unknown_key_names_the_likeliest_and_three_others_at_most():
    message = refused(["--training.dataset_pth", "x"])
    assert "Did you mean" in message and "max_norm" not in message
    message = refused(["--checkpoint.enable_checkpoint"])
    assert "Did you mean checkpoint.enable? Or checkpoint.enable_first_step" in message
    assert message.count("checkpoint.") <= 5
    assert "`graph-trainer train --help training` lists" in refused(["--training.zzz", "x"])


def test_an_adapter_that_ranks_cannot_make_is_refused():
    """With checkpoints or without: torchtitan makes it in any case."""
    from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

    config = load_config([])
    config.model_spec.state_dict_adapter = BaseStateDictAdapter
    with pytest.raises(ConfigError, match="a class without .*get_hf_storage_reader") as caught:
        check_config(config, 2)
    assert 'state_dict_adapter = "BaseStateDictAdapter"' in str(caught.value)
    assert "Derive it from torchtitan.protocols.state_dict_adapter.StateDictAdapter" in str(
        caught.value
    )


def test_the_launcher_names_the_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert "3 are started" in refused(["--parallelism.data_parallel_shard_degree=2"])
    monkeypatch.setenv("WORLD_SIZE", "three")
    assert "WORLD_SIZE" in refused([])


def test_a_config_without_a_model_is_refused():
    config = load_config([])
    config.model_spec = None
    with pytest.raises(ConfigError, match="no model"):
        check_config(config, 2)


TOML = st.recursive(
    st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.datetimes(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=8) | st.sampled_from(["type", "unset"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def config():
    return load_config([])


@examples(100)
@given(data=st.data())
def test_whatever_a_file_holds_gives_a_config_or_our_own_error(config, data):
    """Known sections with known and unknown keys, any value anywhere."""
    import dataclasses

    sections = {
        f.name: [k.name for k in dataclasses.fields(getattr(config, f.name))]
        for f in dataclasses.fields(config)
        if dataclasses.is_dataclass(getattr(config, f.name))
    }
    table = {}
    for name in data.draw(st.lists(st.sampled_from([*sections, "x", "unset"]), max_size=3)):
        keys = st.sampled_from([*sections.get(name, ["y"]), "type", "unset"]) | st.text(max_size=5)
        table[name] = data.draw(TOML | st.dictionaries(keys, TOML, max_size=3))
    try:
        origins = Origins("fuzz.toml")
        merged = merge(table_of(config), with_none(table, "fuzz.toml"), "fuzz.toml", origins)
        built, problems = build_config(config, merged, origins)
        assert (built is None) == bool(problems)
        if built is not None:
            check_config(built, data.draw(st.none() | st.integers(1, 64)))
        assert "fuzz.toml: " in str(refusal(problems, origins)) or not problems
    except GraphTrainerError as e:
        assert str(e)


NAMES = st.sampled_from(["llama3", "graph_trainer.llama3", "llama3_8b", "json", "a.b", "..", ""])


@examples(15)
@given(base=NAMES | TOML, module=NAMES | TOML)
def test_whatever_base_and_module_a_file_names_it_is_loaded_or_refused(base, module):
    import tempfile
    from pathlib import Path

    import tomli_w

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.toml"
        path.write_text(tomli_w.dumps({"base": base, "module": module}), encoding="utf-8")
        try:
            assert load_config(["--config", str(path)]).base == base
        except ConfigError as e:
            assert str(path) in str(e)


@examples(50)
@given(st.text(st.characters(codec="utf-8"), max_size=40) | st.binary(max_size=40))
def test_whatever_bytes_a_file_has_it_is_read_or_refused(content):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.toml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        try:
            assert isinstance(read_toml(path, "--config"), dict)
        except ConfigError as e:
            assert str(path) in str(e)


_MTP = "--module torchtitan.models.deepseek_v3 --config deepseek_v3_debugmodel_mtp"


@pytest.mark.parametrize(
    ("words", "said", "remedy"),
    [
        (
            "--module torchtitan.models.muse_glimmer --config muse_glimmer_debugmodel "
            "--training.seq_len 129",
            "training.seq_len = 129: longer than the sliding window of 128 tokens",
            "Set training.seq_len to 128 or less",
        ),
        (
            "--module torchtitan.models.gpt_oss --config gpt_oss_20b",
            'base = "gpt_oss_20b": gpt_oss 20b: its attention has the parameters sinks',
            "Train another model",
        ),
        (
            "--module torchtitan.models.flux --config flux_debugmodel",
            'base = "flux_debugmodel": FluxTrainer.Config has encoder',
            "with torchtitan alone",
        ),
        (
            "--module torchtitan.models.qwen3 --config qwen3_moe_deepep "
            "--parallelism.expert_parallel_degree 1",
            'base = "qwen3_moe_deepep": qwen3 debugmodel_moe sends tokens to experts by DeepEP',
            "Name an entry with torchtitan's standard dispatcher",
        ),
        (
            "--module torchtitan.models.llama3 --config llama3_debugmodel_dist_gemm",
            'base = "llama3_debugmodel_dist_gemm": llama3 debugmodel refuses the config: tp_gemm',
            "choose another base",
        ),
        (
            f"{_MTP} --loss.type chunked_cross_entropy",
            'loss.type = "chunked_cross_entropy": deepseek_v3 debugmodel makes several predictions',
            "Leave [loss] out",
        ),
        (
            "--module graph_trainer.deepseek_v3 "
            "--loss.type torchtitan.models.deepseek_v3.mtp:MTPLoss.Config",
            'loss.type = "torchtitan.models.deepseek_v3.mtp:MTPLoss.Config": deepseek_v3 '
            "debugmodel makes one prediction",
            "Leave [loss] out",
        ),
        (
            f"{_MTP} --compile.mode eager --validator.enable",
            "validator.enable = true: deepseek_v3 debugmodel makes several predictions",
            "set compile.mode",
        ),
    ],
)
def test_what_a_model_cannot_do_is_refused_with_key_value_and_remedy(words, said, remedy):
    message = refused(words.split())
    assert said in message and remedy in message, message
    assert len(message.splitlines()) == 1


def test_a_module_whose_packages_do_not_fit_each_other_is_refused(tmp_path, monkeypatch):
    (tmp_path / "broken_registry.py").write_text("raise RuntimeError('operator x does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    message = refused(["--module", "broken_registry"])
    assert "--module broken_registry: its import fails at " in message
    assert "broken_registry.py:1: operator x does not exist. Mend it." in message
    (tmp_path / "unclosed_registry.py").write_text("x = (")
    message = refused(["--module", "unclosed_registry"])
    assert "its import fails: '(' was never closed (unclosed_registry.py, line 1). Mend" in message


def test_a_value_of_the_registry_entry_is_said_to_be_its(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text('base = "llama3_8b"\n[tokenizer]\ntype = "huggingface"\n')
    said = (
        'hf_assets_path = "./assets/hf/Llama-3.1-8B" of config llama3_8b: there is no such folder'
    )
    assert f"own.toml: {said}" in refused(["--config", str(path)])
    assert f"command line: {said}" in refused(["--config", "8b", "--tokenizer.type=huggingface"])
    unset = refusal([Problem("a", "is odd", "Mend it.", value=1)], Origins("config llama3_8b"))
    assert str(unset) == "config llama3_8b: a = 1: is odd. Mend it."
