"""Overlap: order the nodes so that collectives run at the same time as compute.

Nodes are moved, never added or removed.
"""
