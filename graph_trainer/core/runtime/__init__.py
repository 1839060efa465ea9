"""The captured step at run time: compiled, cached by shape, watched while it communicates.

No pass and no capture lives here, and no train loop.
"""
