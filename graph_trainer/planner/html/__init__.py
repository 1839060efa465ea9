"""A plan as one page that opens offline: `graph-trainer plan --html FILE`.

It shows what a plan says and computes nothing of its own.
"""
