"""Llama Stack providers: `inline::lockstep` trains in processes of its own, `remote::lockstep` asks a service to.

Works with llama-stack 0.2.3 to 0.6.1. Never imports torch, and llama-stack only to tell its version.
"""
