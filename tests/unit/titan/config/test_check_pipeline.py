"""Pipelines that cannot run are refused before any rank starts."""

import pytest

import graph_trainer as gt
from graph_trainer.planner.fake_rank import FakeRank
from graph_trainer.titan.config.check import wanted_ranks
from graph_trainer.titan.config.check_pipeline import schedule_of
from graph_trainer.titan.config.load import load_config

LLAMA3 = ["--module", "graph_trainer.llama3", "--config", "debugmodel"]
TIED = ["--module", "torchtitan.models.qwen3", "--config", "qwen3_0_6b"]
SEVERAL_TOKENS = [
    *("--module", "torchtitan.models.deepseek_v3", "--config", "deepseek_v3_debugmodel_mtp")
]
KEY = "parallelism.pipeline_parallel"


def flags(degree, schedule="1F1B", rows=8, **others):
    words = [f"--{KEY}_degree", str(degree), f"--{KEY}_schedule", schedule]
    words += ["--training.local_batch_size", str(rows)]
    for key, value in others.items():
        words += [f"--{key.replace('__', '.')}", str(value)]
    return words


@pytest.mark.parametrize(
    ("model", "given", "said"),
    [
        (LLAMA3, flags(0), f"{KEY}_degree = 0: out of bounds"),
        (LLAMA3, flags(2, "PipelineScheduleMulti"), "no schedule that graph_trainer runs"),
        (LLAMA3, flags(2, rows=1), "1 microbatches of"),
        (
            LLAMA3,
            flags(2, rows=7, **{f"{KEY}_microbatch_size": 2}),
            "pipeline_parallel_microbatch_size (2) when",
        ),
        (LLAMA3, flags(4, "Interleaved1F1B", rows=13), "runs in 3 rounds"),
        (LLAMA3, flags(2, "DualPipeV", rows=3), "needs one for each of 4 stages"),
        (LLAMA3, flags(2, "ZBVZeroBubble", **{f"{KEY}_layers_per_stage": 4}), "has two stages on"),
        (LLAMA3, flags(16, rows=16), "makes 16 stages of 6 layers"),
        (LLAMA3, flags(2, **{f"{KEY}_layers_per_stage": 2}), "makes 4 stages of 6 layers"),
        (LLAMA3, flags(2, compile__mode="partitioned"), f"not supported with {KEY}_degree = 2"),
        (TIED, flags(2), "one weight for embedding and output head"),
        (SEVERAL_TOKENS, flags(2), "predicts several tokens"),
        (["--module", "transformers"], flags(2), "has no pipelining_fn"),
    ],
)
def test_what_cannot_run_is_refused_before_ranks_start(model, given, said):
    with pytest.raises(gt.ConfigError) as raised:
        load_config([*model, *given], world_size=None)
    assert said in str(raised.value)


SPLIT = [["tok_embeddings", "layers.0"], ["layers.1", "layers.2"]]
SPLIT += [["layers.3", "layers.4", "layers.5"], ["norm", "lm_head"]]


@pytest.mark.parametrize(
    "split", [SPLIT, [*SPLIT[:3], ["lm_head"]], [["layers.0"], *SPLIT[1:]], [SPLIT[0], *SPLIT]]
)
def test_a_split_names_every_module_once(split, tmp_path):
    file = tmp_path / "split.toml"
    text = f"[parallelism]\nmodule_fqns_per_model_part = {split}\n"
    file.write_text(f'base = "llama3_debugmodel"\n{text}')
    words = [*LLAMA3[:2], "--config", str(file), *flags(2, "LoopedBFS", rows=5)]
    if split is SPLIT:
        load_config(words, world_size=None)
    else:
        with pytest.raises(gt.ConfigError, match="module_fqns_per_model_part = "):
            load_config(words, world_size=None)


GOOD = "0F0,0F1,0I0,0W0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (GOOD, None),
        ("0F0,0F1,0I0,0W0,0B1\n", "stage 1 does not run F once"),
        (GOOD + "\n", "incorrect number of ranks"),
        (GOOD.replace("1B1", "1B2"), "stage 1 does not run F once"),
        (GOOD.replace("1B1", "1B1,1F1"), "stage 1 does not run F once"),
        (GOOD.replace("0W0,", ""), "either B or I and W"),
        (GOOD.replace("0B1", "0B0"), "either B or I and W"),
        (
            GOOD.replace("0F1,0I0", "0I0,0F1")
            .replace("0F0,", "0F1,")
            .replace("0I0,0F1", "0I0,0F0"),
            "without first running Forward",
        ),
        (GOOD.replace("1F1", "2F1"), "2F1 is of none of the 2 stages"),
        (GOOD.replace("0F0", "0SEND_F0"), "'0SEND_F0' is none of F, B, I and W"),
        (GOOD.replace("0F0", "(0F0;0B1)OVERLAP_F_B"), "is none of F, B, I and W"),
        (GOOD.replace("0F0", "forward"), "'forward' is no action"),
        (GOOD.replace("0F0", "0F0x"), "'0F0x' is no action"),
        ("1F0,1B0,1F1,1B1\n0F0,0F1,0I0,0W0,0B1\n", "stage 1 is on line 1 and not 2"),
        # each waits for the other
        ("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n", "no schedule of 2 ranks"),
    ],
)
def test_a_file_has_a_schedule_that_can_run(text, problem, tmp_path):
    file = tmp_path / "schedule.csv"
    file.write_text(text)
    words = [*LLAMA3, *flags(2, rows=2), f"--{KEY}_schedule_csv", str(file)]
    if problem is None:
        assert schedule_of(load_config(words, world_size=None)) == str(file)
        return
    with pytest.raises(gt.ConfigError, match="Write a line a rank") as raised:
        load_config(words, world_size=None)
    assert problem in str(raised.value)


def test_stages_multiply_the_ranks():
    config = load_config([*LLAMA3, *flags(2, "Interleaved1F1B")], world_size=4)
    assert wanted_ranks(config) == 2
    both = flags(2, parallelism__tensor_parallel_degree=2)
    assert wanted_ranks(load_config([*LLAMA3, *both], world_size=None)) == 4
    with pytest.raises(gt.ConfigError, match="pipeline_parallel_degree = 2"):
        load_config([*LLAMA3, *flags(2)], world_size=3)


def test_one_fake_rank_has_no_whole_model_of_a_pipeline():
    config = load_config([*LLAMA3, *flags(2)], world_size=2)
    with pytest.raises(gt.ConfigError, match="not split into stages"):
        FakeRank(config, 2)
