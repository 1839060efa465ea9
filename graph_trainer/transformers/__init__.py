"""Any causal language model of the library transformers: a config registry and a wrapper."""
