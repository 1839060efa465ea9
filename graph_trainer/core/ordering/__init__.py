"""The order check: every rank must run the same collectives in the same order.

It has two front ends: `proof` has the sequences of all ranks, and `exchange` runs on each rank with
its own. A difference is an error; no order is changed.
"""
