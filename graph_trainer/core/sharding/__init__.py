"""SimpleFSDP: parameters as DTensors, gathered by the model's own forward.

Independent of torchtitan and of graphs: a sharded model also runs without a capture.
"""
