"""What test_communication_passes.py trains: meshes, and ways to merge and schedule collectives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.integration.matrix import (
    DDP8,
    FP32,
    FSDP2,
    FSDP4_TP2,
    FSDP8,
    HSDP2X2_TP2,
    Flags,
    replicate,
    rows,
    shard,
)

BOTH = ("always", "never")


@dataclass(frozen=True)
class Variant:
    """Passes behind the default ones, and options of bucket_collectives."""

    bucketing: dict[str, Any] = field(default_factory=dict)
    passes: tuple[str, ...] = ()


VARIANTS = {
    "none": Variant(),
    "size": Variant({"strategy": "size", "cap_mib": 1.0}),
    "transformer_block": Variant({"strategy": "transformer_block"}),
    "auto": Variant({"strategy": "auto"}),
    "scheduled": Variant({"strategy": "transformer_block"}, ("schedule_overlap",)),
}

MESHES: dict[str, tuple[Flags, tuple[str, ...]]] = {
    "fsdp8": (FSDP8 | FP32, BOTH),
    "fsdp4_tp2": (FSDP4_TP2 | FP32, BOTH),
    "hsdp2x2_tp2": (HSDP2X2_TP2 | FP32, BOTH),
    "ddp8": (DDP8 | FP32, ("never",)),
    "fsdp2": (FSDP2 | FP32, ("always",)),
    "ddp2": (replicate(2) | shard(1) | rows(4) | FP32, ("never",)),
}
EIGHT = ("fsdp8", "fsdp4_tp2", "hsdp2x2_tp2", "ddp8")
TWO = ("fsdp2", "ddp2")
