"""Read-only views of a joint graph: collectives, unshard chains, lifetimes, memory.

Nothing here changes a graph, and nothing asks what machine it will run on.
"""
