"""What a run will need: the step captured on a rank without a network, simulated and shown.

Nothing here trains. It reads the configuration and what the trainer captures.
"""
