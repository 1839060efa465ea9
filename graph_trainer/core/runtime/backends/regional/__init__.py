"""Compile a graph region by region, each kind of region once."""
