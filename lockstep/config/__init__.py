"""The run configuration: one YAML file, frozen, validated once at the door."""

from lockstep.config.algorithm import AlgorithmConfig, DpoConfig, KtoConfig, SftConfig
from lockstep.config.cluster import LaunchConfig, PoolConfig, settle_pool
from lockstep.config.data import DataConfig, SourceConfig
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
from lockstep.config.reinforcement import GrpoConfig, RewardConfig, RolloutsConfig
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
from lockstep.config.yamltree import ConfigError

__all__ = [
    "AlgorithmConfig",
    "BatchConfig",
    "CheckpointConfig",
    "ConfigError",
    "DataConfig",
    "Degrees",
    "DpoConfig",
    "EvaluationConfig",
    "GrpoConfig",
    "KtoConfig",
    "LaunchConfig",
    "LoggingConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "PoolConfig",
    "RewardConfig",
    "RolloutsConfig",
    "RunConfig",
    "SftConfig",
    "SourceConfig",
    "check_config",
    "known_keys",
    "load_config",
    "parse_config",
    "resolve_config",
    "sections_of",
    "settle_pool",
    "validate_config",
]
