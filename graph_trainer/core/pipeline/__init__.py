"""Pipeline parallelism for any module: every stage is a joint graph of its own.

`capture_stage` makes the graph, `stage.py` runs its two halves and passes tensors to other stages,
and `schedule.py` runs the stages of a rank by a schedule of torch.distributed.pipelining.
"""
