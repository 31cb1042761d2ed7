"""From names in a configuration to functions: rewards and environments of ours, and module:function of the user's.

Must not know where they run.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from lockstep.config import ConfigError
from lockstep.rollouts.environments.calculator import Calculator
from lockstep.rollouts.rewards.builtin import BUILTIN
from lockstep.rollouts.rewards.reward import Environment, RewardFunction

ENVIRONMENT = "environment"
"""The name of the reward that an environment itself gives, added up over its turns."""
ENVIRONMENTS: dict[str, Callable[..., Environment]] = {"calculator": Calculator}


def load_reward(name: str, options: Mapping[str, Any]) -> RewardFunction:
    """Options of a function of the user's own are passed to it by name, with every call."""
    if ":" in name:
        function = load_name(name, "algorithm.reward")
        return lambda text, row: function(text, row, **options)
    if name == "reasoning_gym":
        from lockstep.rollouts.environments.reasoning import reasoning_gym

        maker: Callable[..., RewardFunction] = reasoning_gym
    elif name in BUILTIN:
        maker = BUILTIN[name]
    else:
        known = ", ".join([*BUILTIN, "reasoning_gym", ENVIRONMENT])
        raise ConfigError(f"algorithm.reward {name!r} is unknown: use {known}, or write module:function")
    try:
        return maker(**options)
    except Exception as error:  # a wrong option, or a pattern that is none
        raise ConfigError(f"algorithm.reward {name} does not take these options: {error}") from error


def load_environment(name: str) -> Callable[[], Environment]:
    if ":" in name:
        return load_name(name, "algorithm.environment")
    if name not in ENVIRONMENTS:
        known = ", ".join(ENVIRONMENTS)
        raise ConfigError(f"algorithm.environment {name!r} is unknown: use {known}, or write module:class")
    return ENVIRONMENTS[name]


def load_name(setting: str, key: str) -> Callable[..., Any]:
    """`setting` is module:function; the module may lie in the working directory."""
    module_name, _, function_name = setting.partition(":")
    if not module_name or not function_name:
        raise ConfigError(f"{key} {setting!r}: write module:function, for example rewards:polite")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module of the user's runs its own code
        raise ConfigError(
            f"{key} {setting!r}: {module_name} cannot be imported ({type(error).__name__}: {error}): put it into the "
            "working directory or install it"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{key} {setting!r}: {module_name} has no function {function_name}")
    return function
