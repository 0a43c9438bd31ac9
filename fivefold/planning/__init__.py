"""Plans a run before a GPU is taken: memory, time, traffic, search over layouts, simulation. No torch."""
