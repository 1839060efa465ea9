"""The order check: the same collectives in the same order on every rank.

`proof` (all sequences at hand) and `exchange` (one rank each) are its two front ends. Nothing
here changes an order; a difference is an error.
"""
