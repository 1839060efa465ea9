"""Which of torchtitan's registered recipes run and fit on H100: `python -m benchmarks.recipes`.

Every config function of the models that graph_trainer ships is checked as `graph-trainer check`
does, unchanged but for what a captured step excludes (see `to_graph_trainer_config`): scaled dot
product attention, and a loss in chunks by graph_trainer's own. torchtitan's [compile] is not taken
over. The number of GPUs is the one that the docstring states, the product of the degrees where
that is fixed, or else the most of up to eight that the degrees divide.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.errors import ConfigError
from graph_trainer.planner.processes import usable_processes
from graph_trainer.planner.recipe_check import (
    Check,
    Recipe,
    RecipeRow,
    check_recipes,
    check_report,
    check_text,
)
from graph_trainer.planner.terminal import print_table, progress
from graph_trainer.titan.config.check import wanted_ranks
from graph_trainer.titan.config.load import load_config
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.config.sources import registry_functions, registry_module

FAMILIES = ("llama3", "qwen3", "deepseek_v3")
_GPUS = 8
"""Where nothing else states a number: one node."""
_STATED = re.compile(r"(\d+) GPUs|NGPU=(\d+)")


def main() -> None:
    """Check the recipes, print a table, what would help and the counts, and JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="recipes whose names contain this")
    parser.add_argument("--order", action="store_true", help="prove the order of all ranks too")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    flags = parser.parse_args()
    hardware, start = load_hardware("h100-sxm"), time.perf_counter()
    rows = []
    with tempfile.TemporaryDirectory() as scratch, chdir(scratch), progress("recipes") as say:
        for family in FAMILIES:
            module = f"torchtitan.models.{family}"
            for name, function in registry_functions(registry_module(module)).items():
                if flags.only in name:
                    recipe, ranks = _recipe(module, name, function)
                    check = Check(hardware, ranks, proves_order=flags.order)
                    rows += check_recipes([recipe], check, say, usable_processes())
    print_table(check_text(rows, hardware))
    counts = Counter(map(_verdict, rows))
    print(", ".join(f"{number} {verdict}" for verdict, number in counts.items()))
    report = check_report(rows, hardware)
    report |= {"counts": counts, "seconds": time.perf_counter() - start}
    document = json.dumps(report)
    if flags.json is not None:
        flags.json.write_text(document + "\n")
    print(document)


def _recipe(module: str, name: str, function: Callable[[], Any]) -> tuple[Recipe, int | None]:
    """Write a config file that changes nothing of a torchtitan recipe to the current folder; return
    the recipe, and the number of GPUs that it is for."""
    path = Path(f"{name}.toml")
    text = f'module = "{module}"\nbase = "{name}"\n'
    path.write_text(text)

    def load(more: Sequence[str], ranks: int | None = None) -> GraphTrainerConfig:
        return load_config(["--config", str(path), *more], world_size=ranks, reads_text=False)

    recipe = Recipe(name, load)
    try:
        config = load(())
    except ConfigError:  # which the check reports, without a remark on ranks
        return recipe, None
    if config.replaces_chunked_loss:  # by one of as many chunks
        path.write_text(f'{text}[loss]\ntype = "chunked_cross_entropy"\n')
    if stated := _STATED.search(function.__doc__ or ""):
        return recipe, int(stated[1] or stated[2])
    ranks = wanted_ranks(config)
    if config.parallelism.data_parallel_shard_degree < 1:
        ranks *= max(1, _GPUS // ranks)
    return recipe, ranks


def _verdict(row: RecipeRow) -> str:
    if row.error:
        return "refused"
    if row.fits:
        return "fit"
    return "fit after a change" if row.change else "do not fit by any setting"


if __name__ == "__main__":
    main()
