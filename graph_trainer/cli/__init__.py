"""graph-trainer train, plan, passes, config, doctor, bisect-passes.

Words of the command line and how results look; what they mean lives further down.
"""
