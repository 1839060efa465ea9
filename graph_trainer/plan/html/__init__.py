"""A plan as one page that opens offline: `graph-trainer plan --html FILE`."""

from graph_trainer.plan.html.page import write_page

__all__ = ["write_page"]
