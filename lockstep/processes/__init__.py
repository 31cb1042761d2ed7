"""The one way to start, call, watch and end processes, on this machine or on Ray: deadlines, frames, tensors."""
