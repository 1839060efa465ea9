"""Degrees, dispatchers and modes that expert parallelism refuses before any rank starts."""

import copy

import pytest

import graph_trainer as gt
from graph_trainer.planner.fake_rank import FakeRank
from graph_trainer.titan.config.check import check_config, wanted_ranks
from graph_trainer.titan.config.load import load_config

from torchtitan.models.common.token_dispatcher import HybridEPTokenDispatcher  # isort: skip

QWEN3 = ["--module", "graph_trainer.qwen3", "--config", "debugmodel_moe"]
LLAMA3 = ["--module", "graph_trainer.llama3", "--config", "debugmodel"]
DEGREE = "parallelism.expert_parallel_degree"
IMBALANCE = "compile__expert_imbalance"


def flags(degree, **others):
    words = [f"--{DEGREE}", str(degree)]
    for key, value in others.items():
        words += [f"--{key.replace('__', '.')}", str(value)]
    return words


@pytest.mark.parametrize(
    ("model", "given", "ranks", "said"),
    [
        (QWEN3, flags(0), 4, f"{DEGREE} = 0: out of bounds"),
        (LLAMA3, flags(2), 4, f"{DEGREE} = 2: llama3 debugmodel has no experts"),
        (QWEN3, flags(3), 3, f"{DEGREE} = 3: does not divide the 64 experts of qwen3"),
        (QWEN3, flags(4), 2, f"{DEGREE} = 4: does not divide the 2 ranks of"),
        (QWEN3, flags(4, parallelism__data_parallel_shard_degree=2), None, "divide the 2 ranks of"),
        (
            QWEN3,
            flags(2, parallelism__tensor_parallel_degree=2, training__seq_len=15)
            + ["--parallelism.no-enable_sequence_parallel"],
            4,
            "training.seq_len = 15: not divisible by",
        ),
        (QWEN3, flags(2, compile__mode="partitioned"), 4, 'compile.mode = "partitioned": its'),
        (LLAMA3, flags(1, **{IMBALANCE: 1.5}), 4, "imbalance = 1.5: the model has no experts"),
        (QWEN3, flags(1, **{IMBALANCE: 1.5}), 4, f"imbalance = 1.5: {DEGREE} = 1: every rank has"),
        (QWEN3, flags(2, **{IMBALANCE: 2.5}), 4, f"imbalance = 2.5: {DEGREE} = 2, so a rank that"),
        (QWEN3, flags(2, **{IMBALANCE: 0.5}), 4, "imbalance = 0.5: out of bounds"),
    ],
)
def test_what_does_not_fit_is_refused_with_key_value_and_remedy(model, given, ranks, said):
    with pytest.raises(gt.ConfigError) as raised:
        load_config([*model, *given], world_size=ranks)
    message = str(raised.value)
    assert said in message and ". Set " in message


def test_even_shares_are_what_any_config_has():
    loaded = load_config([*LLAMA3, *flags(1, **{IMBALANCE: 1})], world_size=4)
    assert loaded.compile.expert_imbalance == 1


@pytest.mark.parametrize("path", ["", "folder", "a\0b"])
def test_a_routing_that_is_no_file_is_refused(tmp_path, path):
    (tmp_path / "folder").mkdir()
    words = [*QWEN3, "--dump_folder", str(tmp_path), "--metrics.save_routing", path]
    with pytest.raises(gt.ConfigError, match=r"save_routing = .*: not a file to write to\. Name a"):
        load_config(words, world_size=2)


@pytest.mark.parametrize("degree", [1, 2])
def test_other_dispatchers_than_the_standard_one_are_refused(degree):
    config = load_config([*QWEN3, *flags(degree)], world_size=4)
    config = copy.deepcopy(config)
    for layer in config.model_spec.model.layers:
        experts = layer.moe.routed_experts
        experts.token_dispatcher = HybridEPTokenDispatcher.Config(
            num_experts=64, top_k=8, hidden_dim=256, num_max_tokens_per_rank=64
        )
    with pytest.raises(
        gt.ConfigError, match=r"base = .* by HybridEPTokenDispatcher, whose kernels.*standard"
    ):
        check_config(config, 4)


@pytest.mark.parametrize(
    ("degree", "others", "ranks"),
    [(1, {}, 2), (2, {}, 2), (4, {}, 4), (4, {"parallelism__tensor_parallel_degree": 2}, 4)],
)
def test_open_shards_are_as_many_as_experts_need(degree, others, ranks):
    assert wanted_ranks(load_config([*QWEN3, *flags(degree, **others)])) == ranks


@pytest.mark.parametrize("key", ["training.enable_cpu_offload", "parallelism.spmd_backend"])
def test_a_config_of_python_meets_what_sharding_supports_too(key):
    """Nobody has checked it: it was changed after it was loaded."""
    config = load_config(["--config", "debugmodel"], world_size=2)
    section, name = key.split(".")
    setattr(getattr(config, section), name, True if "offload" in name else "full_dtensor")
    with pytest.raises(gt.ConfigError, match=f"{key} is .*does not support: set it to"):
        FakeRank(config, 2)


def test_a_config_of_python_without_experts_is_not_divided_by_them():
    config = load_config(LLAMA3, world_size=4)
    config.parallelism.expert_parallel_degree = 2
    with pytest.raises(gt.ConfigError, match=f"{DEGREE} is 2, and Llama3Model has no experts"):
        FakeRank(config, 4)
