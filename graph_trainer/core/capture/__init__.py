"""Capture: trace forward, loss and backward of any module into one joint graph.

The graph computes what the step computes. Passes change it later.
"""
