"""The keys that a config has for the core's settings, and messages of the core with these keys.

The core names its own API in messages: `PassConfig.memory_limit_gib`, `BucketCollectivesOptions.
strategy`. Whoever trains by a config finds the key there instead.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import fields

from graph_trainer.core.passes.base import Pass
from graph_trainer.core.passes.catalogue import registered_passes
from graph_trainer.core.passes.memory_limit import MORE_SHARDS, SMALLER_BATCH
from graph_trainer.errors import GraphTrainerError, PassError

LIMIT_KEY = "compile.memory_limit_gib"
IMBALANCE_KEY = "compile.expert_imbalance"

_KEYS = {
    "PassConfig.reshard_after_forward": "parallelism.fsdp_reshard_after_forward",
    "PassConfig.activation_policy": "activation_checkpoint.type",
    "PassConfig.recompute_matmuls_of": "activation_checkpoint.force_recompute_mm_shapes_by_fqns",
    "PassConfig.recompute_every_nth_block": "activation_checkpoint.layers",
    "PassConfig.memory_table": "activation_checkpoint.path",
    "PassConfig.allow_offload": "compile.allow_offload",
    "PassConfig.bitwise": "compile.bitwise",
    "PassConfig.hardware": "compile.hardware",
    "PassConfig.memory_limit_gib": LIMIT_KEY,
    "OtherMemory.expert_imbalance": IMBALANCE_KEY,
    "PassConfig.passes": "compile.passes",
    "PassConfig.disable_passes": "compile.disable_passes",
    "PassConfig.verify_passes": "compile.verify_passes",
    "TrainStep.partitioned = False": 'compile.mode = "aot_fx_trace"',
    SMALLER_BATCH: "a smaller training.local_batch_size or training.seq_len",
    MORE_SHARDS: "a larger parallelism.data_parallel_shard_degree, on more ranks",
}
"""By what the core calls it, the key of a config. Options of passes are added by `_names`."""


@functools.cache
def _names(passes: tuple[Pass, ...]) -> tuple[dict[str, str], re.Pattern[str]]:
    """Return the keys by the core's names, with those of the options of these passes; and a pattern
    of a name, the option after it, and the switch that it is set to."""
    keys = dict(_KEYS)
    for pass_ in passes:
        if fields(pass_.options_type):
            keys[pass_.options_type.__name__] = f"compile.{pass_.section}"
    names = "|".join(map(re.escape, keys))
    return keys, re.compile(rf"\b({names})\b(\.\w+)?( = (?:True|False))?")


def with_config_keys(text: str, passes: Iterable[Pass] = ()) -> str:
    """Return a message of the core with the keys of a config in place of the core's names.

    Args:
        passes: of a user's own, whose options may be named too.
    """
    keys, names = _names((*registered_passes().values(), *passes))

    def with_key(match: re.Match[str]) -> str:
        name, option, value = match.groups(default="")
        return keys[name] + option + value.lower()

    return names.sub(with_key, text)


def key_and_problem(
    error: PassError, passes: Iterable[Pass] = ()
) -> tuple[str, str, tuple[str, ...]]:
    """Take an error about settings apart, for a line about the config.

    Args:
        passes: as for `with_config_keys`.

    Returns:
        the key of the setting that the message begins with, "compile.passes" where it begins with
        none; the rest of the message; and the keys of other settings that it names.
    """
    text, passes = str(error), tuple(passes)
    _, names = _names((*registered_passes().values(), *passes))
    named = [with_config_keys(match[1], passes) for match in names.finditer(text)]
    begin = names.match(text)
    if begin is None:
        return "compile.passes", with_config_keys(text, passes), tuple(named)
    problem = text[begin.end() :].removeprefix(":").lstrip()
    key = with_config_keys(begin[0], passes)
    return key, with_config_keys(problem, passes), tuple(named[1:])


@contextlib.contextmanager
def config_keys_in_errors() -> Iterator[None]:
    """While entered, let errors of the core name the keys of a config. Also a decorator."""
    try:
        yield
    except GraphTrainerError as error:
        error.args = (with_config_keys(str(error)), *error.args[1:])
        raise
