"""Models of transformers on real ranks, for test_transformers.py.

Each begins with the weights of its folder, trains for three steps, eagerly and captured, and is
exported. The second reference is the library's own model on the global batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from tests.integration.matrix import DDP4, FP32, FSDP2, HSDP2X2, STEPS, Flags
from tests.integration.recorded import EAGER, Recorded, differing, gradient_errors
from tests.tiny_transformers import flags_of, folder_of

# As TOLERANCE of matrix.py. transformers writes norms (5 roundings) and rotations (3) out, so a
# layer has 26: norm, projection, bias, rotation, scores, softmax, values, projection, sum; norm,
# gate, its activation, product, projection, sum. Outside: embedding, norm, head and loss.
OPERATORS = 2 * (26 * 2 + 8)
TOLERANCE = math.sqrt(2 * OPERATORS) * 2**-24

MESHES: dict[str, Flags] = {"fsdp2": FSDP2, "hsdp2x2": HSDP2X2, "ddp4": DDP4}
_EXPORT: Flags = {
    "checkpoint.enable": True,
    "checkpoint.last_save_in_hf": True,
    "checkpoint.last_save_model_only": True,
    "training.steps": STEPS,
}


def train(folder: Path, name: str) -> dict[str, Any]:
    """One family on one mesh, "family,mesh": what differs, and what the export is read as."""
    family, mesh = name.split(",")
    place = folder / name
    if dist.get_rank() == 0:
        folder_of(family, place, weights=True)
    dist.barrier()
    path = place / family
    flags = flags_of(path) | MESHES[mesh] | _EXPORT | FP32
    eager = Recorded(flags | EAGER, place / "eager")
    seen: list[Any] = []
    eager.batches = _keeping(eager.batches, seen)
    eager.run()
    captured = Recorded(flags, place / "captured").run(counting=True)
    result = {
        "differing": differing(eager, captured),
        "gradients": len(captured.gradients[0]),
        "parameters": len(captured.parameters()),
        "issued": captured.issued,
        "losses": captured.global_losses(),
    }
    loss, gradients = _by_the_library(path, seen[0])
    ours = {n.removeprefix("causal_lm."): g for n, g in captured.full_gradients().items()}
    result |= {"library_loss": loss, "errors": gradient_errors(ours, gradients)}
    trainer = captured.trainer
    trainer.checkpointer.save(trainer.step, last_step=True)
    exported = place / f"captured/checkpoint/step-{STEPS}"
    result["exported"] = _read_back(captured, exported)
    result["exported"]["form"] = sorted(_names(exported) ^ _names(path))
    captured.close()
    eager.close()
    return result


def _keeping(batches: Iterator[Any], seen: list[Any]) -> Iterator[Any]:
    for inputs, labels in batches:
        seen.append((inputs["input"].clone(), inputs["positions"].clone(), labels.clone()))
        yield inputs, labels


def _by_the_library(path: Path, batch: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the global batch, each rank with its rows on an unsharded model.

    Positions make the library keep documents apart where they start anew, so the mask is given.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    window = getattr(model.config, "sliding_window", None)
    inputs, positions, labels = batch
    length = inputs.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    if window is not None:
        mask &= torch.ones_like(mask).triu(1 - window)
    mask = mask.expand(inputs.shape[0], 1, -1, -1)
    # a state space model takes no positions, and its mask is one of padding
    attends = "position_ids" in signature(model.forward).parameters
    more = {"position_ids": positions, "attention_mask": mask} if attends else {}
    logits = model(input_ids=inputs, use_cache=False, **more).logits
    valid = (labels != -100).sum()
    dist.all_reduce(valid)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum") / valid
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    return total.item(), {n: p.grad for n, p in model.named_parameters()}


def _names(folder: Path) -> set[str]:
    """The names of the weights in a folder's safetensors."""
    (file,) = folder.glob("*.safetensors")
    with safe_open(file, "pt") as weights:
        return set(weights.keys())


def _read_back(recorded: Recorded, exported: Path) -> dict[str, Any]:
    """What `from_pretrained` makes of an export: its class, and the weights that are others."""
    from transformers import AutoModelForCausalLM

    whole = {
        name.removeprefix("causal_lm."): p.full_tensor() if isinstance(p, DTensor) else p
        for name, p in recorded.parameters()
    }
    read, info = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    found = dict(read.named_parameters())
    return {
        "class": type(read).__name__,
        "missing": sorted(info["missing_keys"]) + sorted(info["unexpected_keys"]),
        "differ": [n for n, p in whole.items() if not torch.equal(found[n].detach(), p.detach())],
        "names": found.keys() == whole.keys(),
    }
