"""Configs: every command's flags and settings files as checked dataclasses.

parse(cls, argv) reads a command line, load_config(cls, path) a YAML file, from_settings(cls, mapping) a mapping.
Main types: TrainConfig, EvaluateConfig, TextTrainConfig and so on. Imports errors and roles alone, and never torch.
"""

from mmclip.config.clip import (
    DiagnoseConfig,
    EmbedConfig,
    EncodeConfig,
    EvaluateConfig,
    LossConfig,
    ReportConfig,
    TrainConfig,
)
from mmclip.config.model_config import CONFIGS
from mmclip.config.parser import Config, Flag, find_config, from_settings, load_config, parse, read_yaml, values_of
from mmclip.config.sections import TextModelConfig
from mmclip.config.study import AdviseConfig, DemoConfig, StudyConfig
from mmclip.config.text import RagConfig, StsConfig, TextEvaluateConfig, TextTrainConfig

__all__ = [
    "CONFIGS", "AdviseConfig", "Config", "DemoConfig", "DiagnoseConfig", "EmbedConfig", "EncodeConfig",
    "EvaluateConfig", "Flag", "LossConfig", "RagConfig", "ReportConfig", "StsConfig", "StudyConfig",
    "TextEvaluateConfig", "TextModelConfig", "TextTrainConfig", "TrainConfig", "find_config", "from_settings",
    "load_config", "parse", "read_yaml", "values_of",
]  # fmt: skip
