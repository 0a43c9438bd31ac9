"""Machines and worker processes on Ray: the only room that imports ray."""
