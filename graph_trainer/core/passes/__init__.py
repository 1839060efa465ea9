"""Graph passes: one a file, its options beside it; `catalogue` lists them, `pipeline` runs them.

A pass changes a joint graph in place. It does not run the graph, and knows no torchtitan.
"""
