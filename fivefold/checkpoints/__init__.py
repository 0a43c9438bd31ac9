"""One moment of a whole run on disk: manifest, atomic commit, policy, resume."""
