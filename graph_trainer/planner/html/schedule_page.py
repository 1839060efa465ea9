"""Write the page of a pipeline: its tables, and its schedule as a picture."""

from __future__ import annotations

from typing import IO, NamedTuple

from graph_trainer.planner import plan_tables as text
from graph_trainer.planner.html.page import fit_text, write_template
from graph_trainer.planner.measures import duration
from graph_trainer.planner.pipeline_plan import PipelinePlan
from graph_trainer.planner.pipeline_report import (
    pipeline_advice_table,
    pipeline_report,
    pipeline_tables,
    schedule_text,
)
from graph_trainer.planner.schedule_trace import NAMES

_WIDTH = 1040
_LEFT = 48
"""Where boxes begin; the names of ranks stand before."""
_ROW = 26
_LEAST_LABEL = 9
"""Units of width that a number needs for each digit, with its margin."""


class Box(NamedTuple):
    """A program of a stage in the picture, in its units."""

    x: float
    y: float
    width: float
    height: float
    look: str
    """Classes of page.css."""
    label: str
    """The microbatch, empty where there is no room."""
    title: str
    """What is shown where a mouse points."""


def write_schedule_page(plan: PipelinePlan, file: IO[str]) -> None:
    """Write a plan as one HTML page, which loads nothing and runs no script."""
    report = pipeline_report(plan)
    advice = [pipeline_advice_table(report)] if report["advice"] else []
    write_template(
        "schedule.html.jinja",
        file,
        {},
        script_names=(),
        report=report,
        fit=fit_text(report),
        mfus=text.mfu_names([report]),
        tables=pipeline_tables(report) + advice,
        summary=schedule_text(report),
        picture={
            "width": _WIDTH,
            "left": _LEFT,
            "row": _ROW,
            "height": _ROW * plan.num_ranks,
            "boxes": boxes(plan),
            "shared": any(s.seconds.unshard or s.seconds.reduce_grad for s in plan.stages),
            "several": len(plan.stages) > plan.num_ranks,
        },
    )


def boxes(plan: PipelinePlan) -> list[Box]:
    """Place each program of the schedule: a row a rank, time from left to right."""
    scale = (_WIDTH - _LEFT) / plan.timeline.seconds
    placed = []
    for rank, spans in plan.timeline.spans.items():
        for span in spans:
            width, number = span.seconds * scale, span.microbatch
            label = "" if number is None else str(number)
            what = f"{NAMES[span.kind]} of stage {span.stage}"
            what += "" if number is None else f", microbatch {number}"
            # of a rank's stages every second one is lighter
            later = " later" if span.stage // plan.num_ranks % 2 else ""
            placed.append(
                Box(
                    x=round(_LEFT + span.start * scale, 2),
                    y=rank * _ROW + 2,
                    width=round(width, 2),
                    height=_ROW - 4,
                    look=span.kind.name.lower() + later,
                    label=label if width > _LEAST_LABEL * len(label) else "",
                    title=f"{what}: {duration(span.seconds)} from {duration(span.start)}",
                )
            )
    return placed
