"""Llama Stack's post_training API on top of the job service. Needs no llama-stack package."""
