"""Rollout engines in server processes of their own: vLLM and SGLang, spoken to over HTTP on this machine.

engine.generate ──requests──> dialect ──JSON──> http ──> server process (guarded: it ends with whoever started it)
engine.update_weights ──> weights (a model folder in memory, one for all replicas of a node) ──> the server reads it

The server may be installed in an environment of its own (`rollout.server_python`): what passes between the two are
JSON and safetensors files, so that versions of torch and transformers may differ.
"""
