"""Capture: forward, loss and backward of any module become one joint graph.

Nothing here changes the step that was captured; that is what passes are for.
"""
