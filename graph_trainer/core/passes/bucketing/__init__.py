"""Bucketing: decide which collectives are merged into one, and merge them.

Decisions are tags and plans; only `rewrite` changes the graph.
"""
