"""A joint graph as a forward and a backward graph, for callers who own their loop.

No decision is made here: what backward reads of forward in the joint graph is what is saved.
"""
