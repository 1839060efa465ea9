"""What a step costs on a given machine: seconds, memory of an allocator, exposed communication.

Nothing here changes a graph or runs one.
"""
