"""Backends: each compiles a joint graph into a function of a list of tensors.

A backend is one file and one entry of `registry`; no other module compares a backend's name.
"""
