"""Policy losses: one file a method, each with the equation of its paper."""
