"""Bucketing: which collectives travel together, and the rewrite that merges them.

Decisions are tags and plans; only `rewrite` changes the graph.
"""
