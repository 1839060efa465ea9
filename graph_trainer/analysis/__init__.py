"""Read-only views of a joint graph. Each is usable alone and linear or n log n in nodes."""
