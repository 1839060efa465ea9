"""Validation on two gloo ranks, captured and eager, for test_validation.py.

One layer of Llama 3's debug model is trained for two steps and validated after each, and once
more with batches of another size.
"""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import graph_trainer as gt
from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.titan.chunked_loss import ChunkedCrossEntropyLoss
from graph_trainer.titan.config.load import load_config
from graph_trainer.titan.trainer import GraphTrainer
from tests.integration.issued import count_issued, expected_events
from tests.integration.matrix import BF16, COMMON, VALIDATE, Flags, arguments, rows
from tests.integration.matrix import shard as fsdp

FLAGS: Flags = (
    fsdp(2)
    | BF16
    | {
        "compile.passes": "default,overlap_fsdp",
        "compile.bucketing.strategy": "transformer_block",
        "parallelism.fsdp_reshard_after_forward": "always",
    }
)
SIZES = (2, 2, 1)
"""Sequences of a batch in each of three validations; training has two."""


def validate(folder: Path, mode: str) -> dict[str, Any]:
    """What is validated after each of two steps, and once more, and what that leaves."""
    words = COMMON | VALIDATE | {"validator.steps": 2} | rows(2) | FLAGS
    config = load_config(arguments(words | {"compile.mode": mode, "dump_folder": folder}))
    config.model_spec.model.layers = config.model_spec.model.layers[:1]
    config.loss = ChunkedCrossEntropyLoss.Config(global_vocab_size=2048)
    trainer: GraphTrainer = GraphTrainer(config)
    (model,) = trainer.model_parts
    validated: list[float] = []
    trainer.metrics_processor.log_validation = lambda *, loss, step: validated.append(loss)
    captured = mode == "aot_fx_trace"
    result: dict[str, Any] = {"validated": validated, "random": [], "left": []}

    batches = trainer.batch_generator(trainer.dataloader)
    validator = trainer.validator._validator
    for number, size in enumerate(SIZES):
        if number < 2:
            trainer.step += 1
            trainer.train_step(batches)
        validator.local_batch_size = size
        before = gradients(model)
        trainer.validator.validate(trainer.model_parts, trainer.step)
        result["random"].append(torch.get_rng_state().tolist())
        kept = all(torch.equal(before[n], g) for n, g in gradients(model).items())
        result["left"].append([kept, all(m.training for m in model.modules())])
    if captured:
        graphs = trainer.validator.step.joint_graphs()
        result["graphs"] = [graph.history for graph in graphs]
        result["outputs"] = [[o.name for o in graph.signature.outputs] for graph in graphs]
        modules = itertools.chain(*(graph.captured_call.model.modules for graph in graphs))
        result["in_training"] = any(module.training for module in modules)
        joint = graphs[0]  # the one used longest ago
        batch, labels = next(batches)
        batch = {k: v[: SIZES[0]] for k, v in batch.items()}
        model.eval()
        step, inputs = trainer.validator.step, batch.pop("input")
        _, result["issued"] = count_issued(step, model, inputs, labels[: len(inputs)], **batch)
        found = collectives(joint)
        result["expected"] = expected_events(Counter(c.kind for c in found))
        result["roles"] = sorted({str(c.role) for c in found})
        result["lost"] = lose_a_collective(trainer)
    if not captured:
        result["refused"] = refused(trainer)
    trainer.close()
    return result


def refused(trainer: GraphTrainer) -> list[str]:
    """What is said of data without labels, and of data of less than a batch."""
    messages = []
    inputs, labels = next(trainer.batch_generator(trainer.dataloader))
    ignored = inputs, torch.full_like(labels, -100)
    for batches in ([ignored, ignored], []):
        config = SimpleNamespace(build=lambda batches=batches, **_: batches)
        trainer.validator._validator.dl_config._config = config
        try:
            trainer.validator.validate(trainer.model_parts, trainer.step)
        except gt.TrainingError as error:
            messages.append(str(error))
    return messages


def lose_a_collective(trainer: GraphTrainer) -> str:
    """What is said when a collective of validation fails."""

    def fail(*_: Any) -> None:
        raise gt.CollectiveError("the gather", "Connection closed by peer")

    trainer.validator._validator.validate = fail
    try:
        trainer.validator.validate(trainer.model_parts, trainer.step)
    except gt.TrainingError as error:
        return str(error)
    return ""


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.to_local().clone() for n, p in model.named_parameters()}


def run(folder: Path, _: str) -> dict[str, Any]:
    """The same run, eager and captured."""
    return {mode: validate(folder / "validation", mode) for mode in ("eager", "aot_fx_trace")}
