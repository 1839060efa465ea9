"""A plan as one page that opens offline: `graph-trainer plan --html FILE`.

It shows the report of a plan; the simulation's arithmetic has no place here.
"""
