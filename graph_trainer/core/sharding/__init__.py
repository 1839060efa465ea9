"""SimpleFSDP: parameters as DTensors, gathered by the model's own forward.

No torchtitan, and nothing of graphs: a sharded model also runs without a capture.
"""
