"""The built-in passes, one line each, and how a list of names becomes a list of passes."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

from graph_trainer.core.passes.base import Pass
from graph_trainer.core.passes.bucketing.bucket_collectives import bucket_collectives
from graph_trainer.core.passes.bucketing.tag_buckets import tag_buckets
from graph_trainer.core.passes.deduplicate_unshards import deduplicate_unshards
from graph_trainer.core.passes.eliminate_dead_code import eliminate_dead_code
from graph_trainer.core.passes.eliminate_round_trips import eliminate_round_trips
from graph_trainer.core.passes.functionalize_writes import functionalize_writes
from graph_trainer.core.passes.fuse_chained_collectives import (
    fuse_chained_all_gathers,
    fuse_chained_reduce_scatters,
)
from graph_trainer.core.passes.normalize_views import normalize_views
from graph_trainer.core.passes.offload_activations import offload_activations
from graph_trainer.core.passes.overlap.overlap_fsdp import overlap_fsdp
from graph_trainer.core.passes.overlap.schedule_overlap import schedule_overlap
from graph_trainer.core.passes.plan_memory.plan_memory import plan_memory
from graph_trainer.core.passes.rematerialize import rematerialize
from graph_trainer.core.passes.tag_activations import tag_activations
from graph_trainer.core.passes.tag_fsdp_unshards import tag_fsdp_unshards
from graph_trainer.core.suggest import did_you_mean
from graph_trainer.core.text import place_of
from graph_trainer.errors import PassError

# In the order in which they run; the list "default" has those that say so.
_BUILT_IN: tuple[Pass, ...] = (
    normalize_views,
    functionalize_writes,
    eliminate_dead_code,
    deduplicate_unshards,
    eliminate_round_trips,
    fuse_chained_all_gathers,
    fuse_chained_reduce_scatters,
    plan_memory,
    tag_activations,
    tag_fsdp_unshards,
    rematerialize,
    offload_activations,
    tag_buckets,
    bucket_collectives,
    overlap_fsdp,
    schedule_overlap,
)


def registered_passes() -> dict[str, Pass]:
    """Return every built-in pass by name, in the order in which they run."""
    return {p.name: p for p in _BUILT_IN}


def load_pass(text: str) -> Pass:
    """Import a pass of a user's own.

    Args:
        text: "package.module:name", of a function with `@graph_pass`.

    Raises:
        PassError: no such module or name, an object that is not a pass, or a pass with the name of
            a built-in one.
    """
    module_name, _, name = text.partition(":")
    entry = f"PassConfig.passes: '{text}'"
    if not all(part.isidentifier() for part in (*module_name.split("."), name)):
        raise PassError(f"{entry}: write package.module:name, without spaces")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if not f"{module_name}.".startswith(f"{missing}."):
            raise PassError(
                f"{entry}: importing {module_name} failed{place_of(error)}: {error}"
            ) from error
        raise PassError(
            f"{entry}: there is no module '{missing}'; write package.module:name and put the "
            "folder of the package on PYTHONPATH"
        ) from error
    except Exception as error:
        raise PassError(
            f"{entry}: importing {module_name} failed{place_of(error)}: {type(error).__name__}: "
            f"{error}"
        ) from error
    graph_pass = getattr(module, name, None)
    if graph_pass is None:
        passes = [key for key, value in vars(module).items() if isinstance(value, Pass)]
        near = f"; it has the passes {', '.join(passes)}" if passes else " and no other pass"
        raise PassError(f"{entry}: the module {module_name} has no '{name}'{near}")
    if not isinstance(graph_pass, Pass):
        raise PassError(
            f"{entry} is {type(graph_pass).__name__} and not a pass; make a function a pass with "
            "@graph_pass(stage=..., summary=...)"
        )
    if registered_passes().get(graph_pass.name, graph_pass) is not graph_pass:
        raise PassError(
            f"{entry} is a pass named '{graph_pass.name}', as a built-in one is; give the function "
            "another name"
        )
    return graph_pass


def resolve_passes(passes: Sequence[str | Pass], disable_passes: Sequence[str] = ()) -> list[Pass]:
    """Return the passes that two lists name, checked: known, once each, stages in order.

    Args:
        passes, disable_passes: as the fields of `PassConfig`.

    Raises:
        PassError: naming the pass, and the nearest known name where there is one.
    """
    known = registered_passes()
    for names in (passes, disable_passes):
        if names is None or isinstance(names, str):
            raise PassError(
                f"PassConfig.passes and PassConfig.disable_passes are lists of names; got {names!r}"
            )
    selected: list[Pass] = []
    for entry in passes:
        if isinstance(entry, Pass):
            selected.append(entry)
        elif not isinstance(entry, str):
            raise PassError(
                f"PassConfig.passes: {entry!r} is neither a name nor a Pass; make a function a "
                "pass with @graph_pass(stage=..., summary=...)"
            )
        elif entry == "default":
            selected += [p for p in known.values() if p.default]
        else:
            selected.append(load_pass(entry) if ":" in entry else _lookup(entry, known, "passes"))
    for name in disable_passes:
        _lookup(name, known | {p.name: p for p in selected}, "disable_passes")
    selected = [p for p in selected if p.name not in disable_passes]
    names = [p.name for p in selected]
    if twice := [name for place, name in enumerate(names) if name in names[:place]]:
        raise PassError(
            f"PassConfig.passes: '{twice[0]}' is listed twice; a pass runs once: remove one"
        )
    if "default" in passes:
        # in a stage, built-in passes are in the order of the catalogue, others where they were put
        built_in = iter([p for p in known.values() if p in selected])
        selected = [next(built_in) if known.get(p.name) == p else p for p in selected]
        selected.sort(key=lambda p: p.stage)
    for before, after in zip(selected, selected[1:], strict=False):
        if after.stage < before.stage:
            raise PassError(
                f"PassConfig.passes: '{after.name}' (stage {after.stage.name}) is listed after "
                f"'{before.name}' (stage {before.stage.name}); put it in front, stages run in "
                "the order CLEANUP, STRUCTURE, TAG, REMATERIALIZE, COMMUNICATION, SCHEDULE"
            )
    return selected


def check_bitwise(selected: Sequence[Pass]) -> None:
    """Refuse, with a PassError, passes that cannot do without changing the order of a sum."""
    for pass_ in selected:
        if pass_.changes_sums and not pass_.has_bitwise_mode:
            raise PassError(
                f"PassConfig.bitwise: the pass '{pass_.name}' declares that it changes the order "
                "of sums (changes_sums): take it out of PassConfig.passes, or set "
                "PassConfig.bitwise = False"
            )


def _lookup(name: str, known: Mapping[str, Pass], key: str) -> Pass:
    if name in known:
        return known[name]
    of_user = ": one of your own is written package.module:name."
    hint = of_user if "." in name else did_you_mean(name, [*known, "default"], otherwise=of_user)
    raise PassError(
        f"PassConfig.{key}: there is no pass '{name}'{hint} Known passes: {', '.join(known)}"
    )
