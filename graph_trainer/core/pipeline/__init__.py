"""Pipeline parallelism: every stage is a joint graph of its own, run by torch's schedules."""
