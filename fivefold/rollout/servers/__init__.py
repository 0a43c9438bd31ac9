"""Rollout engines that are separate server processes: vLLM and SGLang, over HTTP on this machine.

engine.generate ──requests──> dialect ──JSON──> http ──> server process (its guard ends it with the rollout process)
engine.update_weights ──> model folder in memory, one for all replicas of a node ──> the server reads it

The server may be installed in a separate environment (`rollout.server_python`). Only JSON, packed numbers and
safetensors files pass between the two processes, so that their versions of torch and transformers may differ.
"""
