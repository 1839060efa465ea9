"""Which pass changed the numbers: growing prefixes of the pass list against the eager model."""
