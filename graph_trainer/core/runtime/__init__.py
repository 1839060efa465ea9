"""The captured step at run time: compiled, bound to a model and watched while it communicates.

No pass and no capture lives here, and no train loop.
"""
