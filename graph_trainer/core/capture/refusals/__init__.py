"""Refusals of steps that a graph cannot record, while they are traced or from their graph.

Nothing here changes a graph.
"""
