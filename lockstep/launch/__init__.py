"""Launching: start the workers of a run, watch them, end them. A rank is started by its module's name."""

from lockstep.launch.launcher import Launcher, LauncherBusy, Resources, RunHandle, RunState
from lockstep.launch.local import LocalLauncher

__all__ = ["Launcher", "LauncherBusy", "LocalLauncher", "Resources", "RunHandle", "RunState"]
