"""python -m graph_trainer.planner.train_planned: one rank of a run that is held to a plan."""

from __future__ import annotations

from collections.abc import Sequence

from graph_trainer.train import leave, run, train


def main(argv: Sequence[str]) -> None:
    """Train with the flags given, and only what the file of --plan planned.

    Raises:
        GraphTrainerError: bad input, another step than the planned one, or one that cannot be
            captured or agreed on.
    """
    # imported when `run` is ready for their errors
    from graph_trainer.planner.plan_check import load_config_and_plan
    from graph_trainer.planner.planned_run import PlannedRun

    config, check = load_config_and_plan(argv)
    train(config, None if check is None else PlannedRun(check, config))


if __name__ == "__main__":
    leave(run(work=main))
