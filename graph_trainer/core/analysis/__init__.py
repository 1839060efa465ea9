"""Read-only views of a joint graph: collectives, unshard chains, lifetimes, memory.

Nothing here changes a graph, and nothing depends on the machine it will run on.
"""
