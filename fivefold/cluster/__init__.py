"""Machines and worker processes on Ray: the only package that imports ray."""
