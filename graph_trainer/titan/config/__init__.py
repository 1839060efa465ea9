"""Load one checked config: flags over file, over the registry entry of its `base`, over defaults.

Bad input ends here, before any process group exists, as a ConfigError that names the file, the key,
the value and the remedy. Nothing here trains or plans, and nothing imports the trainer.
"""
