"""One checked config: flags over the file, over the registry entry of its `base`, over defaults.

Bad input ends here, before any process group exists, as a ConfigError that names the file, the
key, the value and what to write instead. Nothing here trains or plans.
"""
