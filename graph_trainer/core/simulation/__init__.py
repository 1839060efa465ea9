"""Simulate a step on a machine: seconds, memory of an allocator, exposed communication.

Graphs are read, not changed and not run.
"""
