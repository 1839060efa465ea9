"""Backends: each makes a function of a list of tensors from a joint graph.

A backend is one file and one line in `base`; nothing outside asks for one by its name.
"""
