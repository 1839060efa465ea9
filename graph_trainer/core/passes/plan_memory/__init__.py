"""Choose what backward keeps, recomputes and gathers again, for the least time in a memory limit.

Decisions only: `rematerialize` acts on the tags.
"""
