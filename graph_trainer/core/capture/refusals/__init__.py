"""Refusals: what a step must not do, found while it is traced or in its graph.

Nothing here changes a graph.
"""
