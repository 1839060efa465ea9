"""Repetition: of layers that are alike four are traced, and the graph is extended to all.

Nothing here traces: the graph of the step comes from tracing.
"""
