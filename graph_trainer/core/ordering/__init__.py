"""The same collectives in the same order on every rank: recorded, proved, exchanged.

Nothing here changes the order; a difference is an error.
"""
