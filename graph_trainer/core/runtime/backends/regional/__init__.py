"""Compile a graph region by region, each kind of region once.

Which nodes are a region is decided in `core.analysis.regions`, since the simulator needs it too.
"""
