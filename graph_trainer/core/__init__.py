"""The core: capture the joint graph of a train step, analyse it, change it by passes, and run it.

It serves any nn.Module. It imports torch, the standard library and, of the rest of graph_trainer,
only the errors.
"""
