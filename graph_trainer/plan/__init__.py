"""What a run will need, told without running it: capture on fake ranks, simulation, reports."""
