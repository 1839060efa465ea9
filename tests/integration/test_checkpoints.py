"""Checkpoints across meshes and programs: what one saved, another goes on from."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.launches import Job, Launches
from tests.integration.matrix import DEEPSEEK_V3, MODELS, QWEN3, QWEN3_MOE, TOLERANCE, Model

PLAIN = "plain_torchtitan_worker.py"
SAVED = Job(4, "checkpoint_cases:saved:")
DROPOUT = Job(4, "checkpoint_cases:dropout_resumed:")
ONE_RANK = Job(1, "checkpoint_cases:resumed_on_one_rank:", after=(SAVED,), phase=2)
PLAIN_SAVES = Job(1, "save", phase=0, script=PLAIN)
FROM_PLAIN = Job(4, "checkpoint_cases:resumed_from_plain_torchtitan:", after=(PLAIN_SAVES,))
ODD = Job(4, "checkpoint_cases:odd_weights_to_hugging_face:")
TIED = Job(4, "checkpoint_cases:tied_across_meshes:")
PLAIN_LOADS = Job(1, "load", after=(SAVED,), phase=2, script=PLAIN)

# what Hugging Face calls some weights of the model
NAMES = {
    "qwen3": (QWEN3, "self_attn.q_norm mlp.gate_proj input_layernorm"),
    "qwen3_moe": (QWEN3_MOE, "self_attn.k_proj mlp.gate mlp.experts.15.down_proj"),
    "deepseek_v3": (
        DEEPSEEK_V3,
        "self_attn.kv_a_proj_with_mqa mlp.experts.7.up_proj mlp.shared_experts.up_proj",
    ),
}

EXPORTED = [
    "model-00001-of-00001.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
]
"""Files of an export beside digests and config.json."""


def exported(model: Model) -> Job:
    return Job(4, f"checkpoint_cases:through_hugging_face:{MODELS.index(model)}")


def jobs(params: dict[str, Any]) -> list[Job]:
    return [params["job"] if "job" in params else exported(NAMES[params["family"]][0])]


def near(losses: list[float]) -> Any:
    """Another mesh sums in another order, and both go on from the same bits."""
    assert len(losses) == 2
    return pytest.approx(losses, rel=TOLERANCE["float32"])


@pytest.mark.quick
@pytest.mark.parametrize("job", [DROPOUT])
def test_a_resumed_run_equals_an_uninterrupted_one(launches: Launches, job: Job) -> None:
    for rank in launches(job):
        assert rank["resumed_at"] == 2
        assert rank["differing"] == []


@pytest.mark.quick
@pytest.mark.parametrize("job", [SAVED])
def test_saved_on_fsdp4_it_goes_on_on_fsdp2_tp2(launches: Launches, job: Job) -> None:
    ranks = launches(job)
    for rank in ranks:
        assert rank["fsdp2_tp2"] == near(rank["losses"][2:])
    # dropout of replicated activations needs the same numbers on all ranks
    (seed,) = {rank["seed_on_fsdp2_tp2"] for rank in ranks}
    assert seed != ranks[0]["seed"]


@pytest.mark.parametrize("job", [ONE_RANK])
def test_saved_on_fsdp4_it_goes_on_on_one_rank(launches: Launches, job: Job) -> None:
    assert launches(job)[0] == near(launches(SAVED)[0]["losses"][2:])


@pytest.mark.parametrize("job", [PLAIN_LOADS])
def test_plain_torchtitan_goes_on_from_our_checkpoint(launches: Launches, job: Job) -> None:
    """The second loss needs the optimizer's state and the schedule as well."""
    (plain,) = launches(job)
    assert plain["imported"] == []
    assert plain["step"] == 4
    assert plain["losses"] == near(launches(SAVED)[0]["losses"][2:])


@pytest.mark.parametrize("job", [FROM_PLAIN])
def test_we_go_on_from_plain_torchtitans_checkpoint(launches: Launches, job: Job) -> None:
    (plain,) = launches(PLAIN_SAVES)
    assert plain["imported"] == []
    for losses in launches(job):
        assert losses == near(plain["losses"][2:])


@pytest.mark.parametrize("job", [TIED])
def test_tied_weights_go_on_on_another_mesh(launches: Launches, job: Job) -> None:
    for rank in launches(job):
        assert rank["other"] == near(rank["after"])
        assert rank["after"][0] < rank["before"][0]


@pytest.mark.parametrize("job", [ODD])
def test_what_is_no_matrix_of_floats_goes_to_hugging_face_too(launches: Launches, job: Job) -> None:
    for rank in launches(job):
        assert rank["differing"] == rank["damage"] == rank["loaded"] == []
        assert "emb.weight" in rank["unlike_before"]
        assert rank["tied_on_one_rank"] == {}
        assert rank["files"] == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]


@pytest.mark.parametrize("family", NAMES)
def test_a_model_goes_to_hugging_face_and_comes_back(launches: Launches, family: str) -> None:
    model, names = NAMES[family]
    for rank in launches(exported(model)):
        assert rank["differing"] == []
        # norms begin as ones under any seed
        assert [name for name in rank["unchanged"] if "norm" not in name] == []
        assert {f"model.layers.1.{name}.weight" for name in names.split()} <= {*rank["names"]}
        assert "model.embed_tokens.weight" in rank["names"]
        # that of the others is the user's, in hf_assets_path
        described = ["config.json"] if family == "qwen3" else []
        assert rank["damage"] == [] and rank["files"] == ["SHA256SUMS", *described, *EXPORTED]
