"""graph-trainer bisect-passes: launch the ranks of a config and show their verdict."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter
from rich.console import Group, RenderableType
from rich.text import Text

from graph_trainer.cli import launcher
from graph_trainer.cli.bisect_worker import VERDICT_FILE
from graph_trainer.core.analysis.node_diff import NodeDifference
from graph_trainer.core.bisect.search import CAPTURE, Prefix, Verdict
from graph_trainer.errors import ConfigError
from graph_trainer.planner.console import plain_table, print_table

HELP = """\
usage: graph-trainer bisect-passes [--module MODULE] [--config NAME_OR_FILE] [--section.key VALUE]

Which pass changed my numbers? Starts the CPU ranks that the config is for, builds the model and
one batch as training would, and runs the step

  1. eagerly, as the sharded model itself: the reference
  2. as captured, before any pass
  3. after the first pass of compile.passes, after the first two, and so on,

each time with the eager backend, from the same parameters, buffers and random numbers. Loss,
gradients and buffers are compared bit by bit on every rank. In the first pass after which
something differs it runs the graphs before and after that pass node by node and names the first
node that differs, and by how much. No step is taken and no checkpoint written.

All flags belong to the config, as those of `train` do; `graph-trainer train --help` lists them.
GPUs are not used. NGPU says how many ranks there are; without it, as many as the degrees of
parallelism multiply to, or 2. A small model finds as much as a large one:

  graph-trainer bisect-passes --training.seq_len 32 --training.local_batch_size 1
      the small Llama 3 on two ranks, with the default passes and little to compute
  graph-trainer bisect-passes --compile.passes default,my_package.passes:my_pass --debug.seed 1
      with a pass of your own, my_pass in my_package/passes.py, and fixed random numbers

Exit code: 0 where everything is equal, 1 where capture or a pass differs, 2 for bad input or where
the ranks failed.
"""

WORKER = "graph_trainer.cli.bisect_worker"
_RANKS_SHOWN = 8


def bisect_passes(argv: Sequence[str], *, worker: str = WORKER) -> int:
    """Run the command.

    This process and its ranks see no GPU from here on.

    Returns:
        The exit code, as HELP says.

    Raises:
        ConfigError: bad input, found before any rank is started.
    """
    from graph_trainer.titan.config.load import load_config

    if {"-h", "--help"} & set(argv):
        print(HELP, end="")
        return 0
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    argv = launcher.with_names_of_environment(argv)
    mode = load_config(argv).compile.mode
    if mode == "eager":
        raise ConfigError(
            f"compile.mode is '{mode}': there is no captured step whose passes could be "
            'examined. Set compile.mode = "aot_fx_trace".'
        )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "verdict.json"
        os.environ[VERDICT_FILE] = str(file)
        launcher.start(launcher.prepare(argv, module=worker))
        if not file.exists():  # the ranks have printed why
            return 2
        verdict = TypeAdapter(Verdict).validate_json(file.read_text())
    print_table(verdict_table(verdict))
    return 0 if verdict.culprit is None else 1


def verdict_table(verdict: Verdict) -> RenderableType:
    """Show a verdict in at most 100 columns.

    A row for each prefix of the pass list, then the pass that changes the numbers, by how much,
    and the first node that differs.
    """
    table = plain_table(
        "Loss, gradients and buffers after each pass, compared with the eager model"
    )
    table.add_column("after", no_wrap=True)
    table.add_column("nodes", justify="right", no_wrap=True)
    table.add_column("differ", justify="right", no_wrap=True)
    table.add_column("first that differs", overflow="fold")
    for heading in ("max abs", "max rel"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("ranks", overflow="fold")
    for prefix in verdict.prefixes:
        table.add_row(*map(Text, _cells(prefix, verdict.compared)))
    return Group(table, Text(_conclusion(verdict), overflow="fold"))


def _cells(prefix: Prefix, compared: int) -> list[str]:
    if not prefix.ranks:
        return [prefix.name, f"{prefix.nodes:,}", "0", f"none of {compared}", "", "", ""]
    first = prefix.differences[prefix.ranks[0]][0]
    result = f"{first.name} ({first.note})" if first.note else first.name
    number = max(map(len, prefix.differences))
    amounts = [f"{first.max_abs:.3g}", f"{first.max_rel:.3g}"]
    return [prefix.name, f"{prefix.nodes:,}", f"{number}", result, *amounts, _ranks(prefix.ranks)]


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_RANKS_SHOWN]))
    return shown if len(ranks) <= _RANKS_SHOWN else f"{shown}, ... ({len(ranks)})"


def _conclusion(verdict: Verdict) -> str:
    culprit, node = verdict.culprit, verdict.first_node
    if culprit is None:
        return "Every prefix is bitwise equal to the eager model on every rank."
    if culprit == CAPTURE:
        return (
            "The graph differs as captured, before any pass: capture is at fault, or the step does "
            "something that no graph holds. Please report it with the config."
        )
    if node is None:
        return (
            f"'{culprit}' is the first pass that changes the numbers. Every node that leads there "
            "and can be compared has the value that it had before; compare the graphs themselves."
        )
    ranks = [rank for rank, each in enumerate(verdict.nodes) if each is not None]
    first = f"'{culprit}' is the first pass that changes the numbers. The first node that differs:"
    return "\n".join([first, *_node_lines(node), f"  on ranks {_ranks(ranks)}"])


def _node_lines(node: NodeDifference) -> list[str]:
    known = {"phase": node.phase, "module": node.module}
    where = ", ".join(f"{key} {value}" for key, value in known.items() if value)
    origin = "kept by the pass" if node.kept else "inserted by the pass"
    lines = [f"  {node.name}  ({node.op})  {where}", f"  {origin}"]
    if node.before:
        lines.append(f"  before  {node.before}")
    lines.append(f"  after   {node.after}")
    amount = f"max abs {node.difference.max_abs:.3g}, max rel {node.difference.max_rel:.3g}"
    if node.difference.note:
        amount += f"; {node.difference.note}"
    at = "" if node.seen_at == node.name else f" at {node.seen_at}, which reads it"
    return [*lines, f"  {amount}{at}"]
