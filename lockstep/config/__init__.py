"""The run configuration: one YAML file, frozen, validated once at the door."""

from lockstep.config.algorithm import AlgorithmConfig, DpoConfig, KtoConfig, SftConfig
from lockstep.config.data import DataConfig, SourceConfig
from lockstep.config.grpo import GrpoConfig, RewardConfig, RolloutsConfig
from lockstep.config.launch import (
    AnyLaunch,
    KubernetesLaunch,
    LaunchConfig,
    LocalLaunch,
    PoolConfig,
    RayLaunch,
    SlurmEngines,
    SlurmLaunch,
    resolve_pool,
)
from lockstep.config.loading import (
    check_config,
    known_keys,
    load_config,
    parse_config,
    resolve_config,
    sections_of,
    validate_config,
)
from lockstep.config.parallel import Degrees, ParallelConfig
from lockstep.config.schema import ConfigError
from lockstep.config.sections import (
    BatchConfig,
    CheckpointConfig,
    EvaluationConfig,
    LoggingConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
)

__all__ = [
    "AlgorithmConfig",
    "AnyLaunch",
    "BatchConfig",
    "CheckpointConfig",
    "ConfigError",
    "DataConfig",
    "Degrees",
    "DpoConfig",
    "EvaluationConfig",
    "GrpoConfig",
    "KtoConfig",
    "KubernetesLaunch",
    "LaunchConfig",
    "LocalLaunch",
    "LoggingConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "PoolConfig",
    "RayLaunch",
    "RewardConfig",
    "RolloutsConfig",
    "RunConfig",
    "SftConfig",
    "SlurmEngines",
    "SlurmLaunch",
    "SourceConfig",
    "check_config",
    "known_keys",
    "load_config",
    "parse_config",
    "resolve_config",
    "resolve_pool",
    "sections_of",
    "validate_config",
]
