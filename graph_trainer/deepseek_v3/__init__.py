"""DeepSeek V3: `--module graph_trainer.deepseek_v3`."""
