"""Runs programs that a model wrote, without network, without files of others, and within limits.

`runner` starts a process for each program; `child` restricts itself by `limits`, `landlock` and `seccomp`, and then
runs the program. What the child imports needs the standard library alone.
"""
