"""Which pass changed the numbers: growing prefixes of the pass list against the eager model.

No command line and no tables; those live in graph_trainer.cli.
"""
