"""The train step: captured, passed through the passes, compared among ranks and run.

Above passes, partition and runtime, whose parts it puts together. No optimizer and no loop.
"""
