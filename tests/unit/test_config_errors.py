"""Every kind of bad input: one ConfigError with the place, the key, the value and a remedy."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_trainer.config import check_config, load_config
from graph_trainer.config.apply import apply_table
from graph_trainer.config.source import read_toml
from graph_trainer.errors import ConfigError, GraphTrainerError

BASE = 'base = "llama3_debugmodel"\n'


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "NGPU", "NNODES"):
        monkeypatch.delenv(name, raising=False)


def refused(argv, world_size=None):
    with pytest.raises(ConfigError) as caught:
        load_config(argv, world_size=world_size)
    return str(caught.value)


# What the file says after `base`, and what the message has to name: key, value, remedy.
IN_FILES = {
    "unknown key": ("[training]\nstepz = 3", ["training.stepz", "3", "training.steps"]),
    "unknown section": ("[trainning]\nsteps = 3", ["trainning", "Did you mean training"]),
    "key without its section": ("steps = 3", ["steps = 3", "Did you mean training.steps"]),
    "key in the wrong section": (
        "[metrics]\nseq_len = 3",
        ["metrics.seq_len", "training.seq_len"],
    ),
    "string for an integer": (
        '[training]\nsteps = "ten"',
        ["training.steps", '"ten"', "an integer", "steps = 1"],
    ),
    "boolean for an integer": ("[training]\nsteps = true", ["training.steps", "true", "integer"]),
    "float for an integer": ("[training]\nsteps = 1.5", ["training.steps", "1.5", "integer"]),
    "integer for a boolean": (
        "[metrics]\nenable_tensorboard = 1",
        ["metrics.enable_tensorboard", "1", "true or false"],
    ),
    "integer too large for a float": (
        f"[lr_scheduler]\nmin_lr_factor = {10**400}",
        ["lr_scheduler.min_lr_factor", "1000", "a number"],
    ),
    "string for a list": (
        '[compile]\npasses = "default"',
        ["compile.passes", '"default"', "a list", "[...]"],
    ),
    "integer in a list of strings": (
        "[compile]\npasses = [1]",
        ["compile.passes[0]", "1", "a string"],
    ),
    "value for a section": ("training = 3", ["training = 3", "section", "[training]"]),
    "list for a section": ("[[training]]\nsteps = 3", ["training", "section", "[training]"]),
    "unknown policy": (
        '[parallelism]\nfsdp_reshard_after_forward = "allways"',
        ["parallelism.fsdp_reshard_after_forward", '"allways"', "Did you mean always"],
    ),
    "unknown mode": ('[compile]\nmode = "jit"', ["compile.mode", '"jit"', '"aot_fx_trace"']),
    "unknown backend": ('[compile]\nbackend = "inducter"', ["compile.backend", "inductor"]),
    "unknown pass": (
        '[compile]\npasses = ["default", "rematerialise"]',
        ["compile.passes", "rematerialise", "Did you mean rematerialize", "tag_fsdp_unshards"],
    ),
    "unknown disabled pass": (
        '[compile]\ndisable_passes = ["dedup_unshards"]',
        ["compile.disable_passes", "dedup_unshards", "deduplicate_unshards"],
    ),
    "pass listed twice": (
        '[compile]\npasses = ["rematerialize", "rematerialize"]',
        ["compile.passes", "rematerialize", "twice", "remove one"],
    ),
    "passes out of order": (
        '[compile]\npasses = ["rematerialize", "normalize_views"]',
        ["compile.passes", "normalize_views", "rematerialize", "put it in front"],
    ),
    "torch.compile switch": (
        "[compile]\nenable = true",
        ["compile.enable", "true", "torch.compile", "compile.mode"],
    ),
    "torch.compile components": (
        '[compile]\ncomponents = ["loss"]',
        ["compile.components", "loss", "compile.backend"],
    ),
    "model in a file": ("[model_spec]\nname = 'x'", ["model_spec", "base"]),
    "unknown type": (
        '[dataloader]\ntype = "txt"',
        ["dataloader.type", '"txt"', "Did you mean text", '"huggingface"'],
    ),
    "type that is no string": ("[dataloader]\ntype = 3", ["dataloader.type", "3", '"text"']),
    "type of another section": (
        '[dataloader]\ntype = "torchtitan.components.loss:CrossEntropyLoss.Config"',
        ["dataloader.type", "CrossEntropyLoss", "BaseDataLoader.Config"],
    ),
    "type that cannot be imported": (
        '[dataloader]\ntype = "no_such_module:X.Config"',
        ["dataloader.type", "no_such_module", "package.module:Class.Config"],
    ),
    "type that is no path": (
        '[dataloader]\ntype = "a b:c"',
        ["dataloader.type", "a b:c", "package.module:Class.Config"],
    ),
    "key of a section that is off": (
        '[activation_checkpoint]\ntype = "none"\ndebug = true',
        ["activation_checkpoint.debug", "true", "Choose another type"],
    ),
    "key of a section that was off": (
        "[activation_checkpoint]\ndebug = true",
        ["activation_checkpoint", "debug", 'Add type = "selective"'],
    ),
    "memory budget without a compiler": (
        '[activation_checkpoint]\ntype = "memory_budget"',
        ["activation_checkpoint.type", '"memory_budget"', '"selective"'],
    ),
    "missing key in a list of tables": (
        "[[optimizer.param_groups]]\npattern = '.*'",
        ["optimizer.param_groups[0]", "optimizer_name", "Add"],
    ),
    "unset that is no list": (
        '[training]\nunset = "steps"',
        ["training.unset", '"steps"', 'unset = ["key"]'],
    ),
    "unset of what cannot be unset": (
        '[training]\nunset = ["steps"]',
        ["training.unset", "steps", "set training.steps instead"],
    ),
    "unset of an unknown key": ('[debug]\nunset = ["sed"]', ["debug.sed", "debug.seed"]),
    "set and unset": ('[debug]\nunset = ["seed"]\nseed = 1', ["debug.seed", "1", "Keep one"]),
    "no steps": ("[training]\nsteps = 0", ["training.steps", "0", "to 1 or more"]),
    "no batch": ("[training]\nlocal_batch_size = -1", ["training.local_batch_size", "-1", "1 or"]),
    "global batch of zero": (
        "[training]\nglobal_batch_size = 0",
        ["training.global_batch_size", "0", "-1 for one"],
    ),
    "norm of zero": ("[training]\nmax_norm = 0", ["training.max_norm", "0", "positive"]),
    "log never": ("[metrics]\nlog_freq = 0", ["metrics.log_freq", "0", "1 or more"]),
    "decay beyond the run": (
        "[lr_scheduler]\ndecay_ratio = 1.5",
        ["lr_scheduler.decay_ratio", "1.5", "fraction"],
    ),
    "refused by torchtitan": (
        "[checkpoint]\nkeep_latest_k = 1",
        ["checkpoint", "checkpoint.keep_latest_k = 1", "Change"],
    ),
    "validation steps": (
        "[validator]\nsteps = 0",
        ["validator.steps = 0", "positive or -1", "Change"],
    ),
    "no graph kept": ("[compile]\nmax_graphs = 0", ["compile.max_graphs", "0", "1 or more"]),
    "cuda graphs": (
        "[training]\ndisable_cuda_graphs = false",
        ["training.disable_cuda_graphs", "false", "= true"],
    ),
    "another sharding back end": (
        '[parallelism]\nspmd_backend = "spmd_types"',
        ["parallelism.spmd_backend", '"spmd_types"', '"partial_dtensor"'],
    ),
    "pipeline parallelism": (
        "[parallelism]\npipeline_parallel_degree = 2",
        ["parallelism.pipeline_parallel_degree", "2", "= 1"],
    ),
    "negative degree": (
        "[parallelism]\ntensor_parallel_degree = -1",
        ["parallelism.tensor_parallel_degree", "-1", "1 or more"],
    ),
    "sequence that tensor parallelism does not divide": (
        "[training]\nseq_len = 255\n[parallelism]\ntensor_parallel_degree = 2",
        ["training.seq_len", "255", "tensor_parallel_degree = 2", "such as 254"],
    ),
    "heads that tensor parallelism does not divide": (
        "[training]\nseq_len = 300\n[parallelism]\ntensor_parallel_degree = 3",
        ["parallelism.tensor_parallel_degree", "3", "n_heads = 16", "1, 2, 4, 8, 16"],
    ),
    "sequence longer than the model's positions": (
        "[training]\nseq_len = 200000",
        ["training.seq_len", "200000", "131072 or less"],
    ),
    "vocabulary larger than the model's": (
        "[tokenizer]\nvocab_size = 4096",
        ["tokenizer.vocab_size", "4096", "2048 or less"],
    ),
    "vocabulary smaller than the bytes": (
        "[tokenizer]\nvocab_size = 100",
        ["tokenizer.vocab_size", "100", "258"],
    ),
    "unknown dataset": ('[dataloader]\ndataset = "stdlip"', ["dataloader", "stdlip", "stdlib"]),
    "dataset that is not there": (
        '[dataloader]\ndataset = "text"\ndataset_path = "no/such/folder"',
        ["dataloader", "no/such/folder", "does not exist"],
    ),
    "validation set that is not there": (
        '[validator]\nenable = true\n[validator.dataloader]\ndataset = "text"\n'
        'dataset_path = "no/such"',
        ["validator.dataloader", "no/such"],
    ),
    "unknown Hugging Face dataset": (
        '[dataloader]\ntype = "huggingface"\ndataset = "c44"',
        ["dataloader.dataset", '"c44"', "Did you mean c4"],
    ),
    "unknown dataset among several": (
        '[dataloader]\ntype = "huggingface_interleaved"\nsources = [{ dataset = "c44" }]',
        ["dataloader.sources[0].dataset", '"c44"', "c4"],
    ),
    "tokenizer that is not there": (
        'hf_assets_path = "no/assets"\n[tokenizer]\ntype = "huggingface"',
        ["hf_assets_path", '"no/assets"', "tokenizer.json", "byte_bpe"],
    ),
    "output folder without a name": ('dump_folder = ""', ["dump_folder", '""', "Name a folder"]),
    "module that is no string": ("module = 3", ["module", "3", "graph_trainer.llama3"]),
    "unknown module in a file": (
        'module = "graph_trainer.lama3"',
        ["lama3", "graph_trainer.llama3"],
    ),
}


@pytest.mark.parametrize("kind", IN_FILES)
def test_bad_files_are_refused(kind, tmp_path):
    text, named = IN_FILES[kind]
    path = tmp_path / "bad.toml"
    path.write_text(BASE + text + "\n")
    message = refused(["--config", str(path)])
    assert "bad.toml" in message or "--module" in message
    for part in named:
        assert part in message, message


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


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a = " + b"[" * 3000])
def test_a_file_that_is_not_text_or_endlessly_nested_is_refused(content, tmp_path):
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    assert str(path) in refused(["--config", str(path)])


def test_a_file_without_base_and_a_folder_are_refused(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text("[training]\nsteps = 1\n")
    message = refused(["--config", str(path)])
    assert "base is missing" in message and "llama3_debugmodel" in message
    path.write_text('base = "llama3_debug"\n')
    message = refused(["--config", str(path)])
    assert '"llama3_debug"' in message and "Did you mean llama3_debugmodel" in message
    assert "cannot be read" in refused(["--config", str(tmp_path) + "/"])


# Flags, and what the message has to name.
ON_THE_COMMAND_LINE = {
    "unknown flag": (["--training.stepz", "3"], ["--training.stepz", "--training.steps"]),
    "unknown flag with =": (["--training.stepz=3"], ["--training.stepz", "--training.steps"]),
    "flag without its section": (["--tensor_parallel_degree", "2"], ["--parallelism.tensor_"]),
    "wrong type": (["--training.steps", "ten"], ["--training.steps", "'ten'", "--help"]),
    "no value": (["--training.steps"], ["--training.steps", "--help"]),
    "unknown choice": (
        ["--parallelism.fsdp_reshard_after_forward", "sometimes"],
        ["--parallelism.fsdp_reshard_after_forward", "'sometimes'", "'always'"],
    ),
    "stray word": (["steps"], ['"steps"', "flag"]),
    "torch.compile switch": (["--compile.enable"], ["--compile.enable", "compile.mode"]),
    "section's own check": (["--checkpoint.interval", "0"], ["checkpoint", "interval 0", "1 step"]),
    "section's assertion": (["--validator.steps", "0"], ["--validator.steps 0", "positive or -1"]),
    "flag of a section that is off": (
        ["--activation_checkpoint.debug"],
        ["--activation_checkpoint.debug", "--activation_checkpoint.type"],
    ),
    "unknown type": (["--dataloader.type", "hf"], ["dataloader.type", '"hf"', '"huggingface"']),
    "type of no section": (["--trainign.type", "x"], ["trainign", "training"]),
    "type without a value": (["--dataloader.type"], ["--dataloader.type", "no value"]),
    "config without a value": (["--config"], ["--config", "debugmodel"]),
    "module without a value": (
        ["--module", "--config", "8b"],
        ["--module", "no value"],
    ),
    "unknown config": (["--config", "8c"], ["8c", "Did you mean 8b", "405b"]),
    "unknown file": (["--config", "no/such.toml"], ["no/such.toml", "no such file"]),
    "unknown module": (["--module", "graph_trainer.lama3"], ["lama3", "graph_trainer.llama3"]),
    "impossible module": (["--module", "..a b"], ["..a b", "graph_trainer.llama3"]),
    "module without configs": (["--module", "json"], ["json", "graph_trainer.llama3"]),
    "bad value": (["--training.steps", "0"], ["command line", "training.steps = 0", "1 or more"]),
    "unknown pass": (["--compile.passes", "x,default"], ["command line", "compile.passes", '"x"']),
}


@pytest.mark.parametrize("kind", ON_THE_COMMAND_LINE)
def test_bad_flags_are_refused(kind, capsys):
    argv, named = ON_THE_COMMAND_LINE[kind]
    message = refused(argv)
    for part in named:
        assert part in message, message
    assert "╭" not in message and "\n" not in message
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("flags", "ranks", "named"),
    [
        ({"data_parallel_shard": 3}, 2, ["data_parallel_shard_degree 3", "2 are started", "-1"]),
        ({"tensor_parallel": 4}, 2, ["tensor_parallel_degree 4", "2 ranks", "multiple of 4"]),
        ({"tensor_parallel": 4}, 6, ["tensor_parallel_degree 4", "6 ranks", "multiple of 4"]),
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


@settings(max_examples=300, deadline=None)
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
        changed = apply_table(config, table, "fuzz.toml")
        check_config(changed, data.draw(st.none() | st.integers(1, 64)))
    except GraphTrainerError as e:
        assert str(e)


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=40) | st.binary(max_size=40))
def test_whatever_bytes_a_file_has_it_is_read_or_refused(content):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.toml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        try:
            assert isinstance(read_toml(path), dict)
        except ConfigError as e:
            assert str(path) in str(e)
