"""Tracing: run a step once on fake tensors, and return a flat graph with annotated nodes.

Repeated layers, and comparing one trace with another, belong to other packages.
"""
