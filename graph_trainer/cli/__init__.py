"""graph-trainer train, plan, passes, config, doctor, bisect-passes.

The command line and the launcher of ranks. Nothing imports from here but `__main__`.
"""
