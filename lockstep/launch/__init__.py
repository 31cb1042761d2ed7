"""Launching: start the workers of a run, watch them, end them. Never imports torch; only the worker entry calls up."""

from lockstep.launch.launcher import Launcher, Resources, RunHandle, RunState
from lockstep.launch.local import LocalLauncher

__all__ = ["Launcher", "LocalLauncher", "Resources", "RunHandle", "RunState"]
