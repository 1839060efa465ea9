"""Tracing: one run of a step on fake tensors becomes a flat graph with annotated nodes.

Nothing here knows that layers repeat, or compares one trace with another.
"""
