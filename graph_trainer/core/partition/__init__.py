"""Partition a joint graph into a forward and a backward graph, for callers with their own loop.

No decision is made here: the values of forward that backward reads in the joint graph are saved.
"""
