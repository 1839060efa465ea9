"""The core: one joint graph of a train step, and what is computed, decided and run on it.

It serves any nn.Module. It imports torch and the standard library and nothing of the other
packages of graph_trainer but its errors.
"""
