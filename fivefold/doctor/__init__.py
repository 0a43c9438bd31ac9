"""The examination of a machine: what it has, what follows from it, and whether two processes compute the same as one.

look at the machine ──> plain facts ──judge──> findings: ok, warning or problem, and what to do ──> report, exit code
"""
