"""Choose what backward keeps, recomputes and gathers again, for the least time in a memory limit.

Only decides: `rematerialize` acts on the tags.
"""
