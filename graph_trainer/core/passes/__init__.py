"""Graph passes: one in each file, with its options; `catalogue` lists them, `pipeline` runs them.

A pass changes a joint graph in place. It does not run the graph, and does not depend on torchtitan.
"""
