"""What the keys of other tools' configurations are called here: for people who come with one of their files."""

from __future__ import annotations

from collections.abc import Iterable

_BATCH = "batch.samples (rows of one step, over all processes and accumulations)"
_LORA = "a lora section"
_MICRO = f"{_BATCH} and batch.micro_batch_tokens (which bounds memory)"
_NOTHING = "not needed"

# Of Axolotl, TRL (TrainingArguments and script arguments), LLaMA-Factory and torchtune. Each answer begins with one of
# our keys, names a section, or says that there is nothing to set. Keys that are called the same here are not listed.
OTHER_TOOLS_KEYS = {
    "adapter": _LORA,
    "attn_implementation": _NOTHING,
    "base_model": "model.path",
    "bf16": "model.precision",
    "cutoff_len": "data.max_length",
    "dataset": "data.train",
    "dataset_name": "data.train",
    "datasets": "data.train",
    "deepspeed": "parallel.deepspeed_config, with parallel.backend: deepspeed",
    "do_train": _NOTHING,
    "dtype": "model.precision",
    "early_stopping_patience": "evaluation.patience",
    "eval_dataset": "data.validation",
    "eval_steps": "evaluation.every_steps",
    "finetuning_type": _LORA + ", or none for all weights",
    "flash_attention": _NOTHING,
    "flash_attn": _NOTHING,
    "fp16": "model.precision",
    "fsdp": "parallel.shard, which is what several processes do by default",
    "fsdp_config": "parallel.shard, which is what several processes do by default",
    "gradient_accumulation_steps": _BATCH,
    "gradient_checkpointing": "model.activation_checkpointing",
    "group_by_length": _NOTHING,
    "learning_rate_scheduler": "optim.schedule",
    "load_in_4bit": "model.quantization: nf4",
    "load_in_8bit": "model.quantization: nf4, or model.precision: fp8_base",
    "logging_steps": "logging.every_steps",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_modules_to_save": "lora.modules_to_save",
    "lora_r": "lora.rank",
    "lora_rank": "lora.rank",
    "lora_target": "lora.targets",
    "lora_target_linear": "lora.targets: all-linear, the default",
    "lora_target_modules": "lora.targets",
    "loss_type": "algorithm.loss",
    "lr": "optim.learning_rate",
    "lr_scheduler": "optim.schedule",
    "lr_scheduler_type": "optim.schedule",
    "max_completion_length": "algorithm.max_tokens",
    "max_seq_length": "data.max_length",
    "max_steps_per_epoch": "optim.max_steps, which counts all of a run",
    "micro_batch_size": _MICRO,
    "model_name_or_path": "model.path",
    "num_epochs": "optim.epochs",
    "num_generations": "algorithm.group_size",
    "num_train_epochs": "optim.epochs",
    "optimizer": "optim.kind",
    "output_dir": "lockstep train --run-dir",
    "packing": _NOTHING,
    "pad_to_sequence_len": _NOTHING,
    "per_device_eval_batch_size": _NOTHING,
    "per_device_train_batch_size": _MICRO,
    "qlora": "model.quantization: nf4, with a lora section",
    "report_to": "logging.tensorboard",
    "reward_funcs": "algorithm.reward",
    "rl": "algorithm.kind",
    "sample_packing": _NOTHING,
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep_last",
    "sequence_len": "data.max_length",
    "stage": "algorithm.kind",
    "tensor_parallel_size": "parallel.tensor",
    "test_datasets": "data.validation",
    "torch_dtype": "model.precision",
    "train_on_inputs": "data.train_on: all",
    "use_peft": _LORA,
    "use_vllm": "rollouts.engines",
    "val_set_size": "data.validation_fraction, as a share of the rows",
    "val_size": "data.validation_fraction",
    "warmup_ratio": "optim.warmup_steps, a number of steps",
}


def explain_other_tools(keys: Iterable[object]) -> str:
    """What those are here that another tool knows; nothing where it is none."""
    known = [f"{key} is {OTHER_TOOLS_KEYS[key]}" for key in keys if isinstance(key, str) and key in OTHER_TOOLS_KEYS]
    return f"keys of other tools, and what they are here: {'; '.join(known)}" if known else ""
