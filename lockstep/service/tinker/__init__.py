"""The Tinker API: training and sampling of LoRA models for its unmodified client."""
