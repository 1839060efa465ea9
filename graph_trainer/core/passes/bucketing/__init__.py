"""Bucketing: which collectives are merged into one, and the rewrite that merges them.

Decisions are tags and plans; only `rewrite` changes the graph.
"""
