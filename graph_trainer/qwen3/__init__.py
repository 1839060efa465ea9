"""Qwen 3, dense and with experts: `--module graph_trainer.qwen3`."""
