"""Overlap: the order of the nodes, so that collectives run beside compute.

Nodes are moved here, never added or removed.
"""
