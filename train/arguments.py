"""keepsight's settings as arguments of the transformers Trainer."""

import math
import os
from pathlib import Path

import torch
from transformers import TrainingArguments
from transformers.utils import is_torch_tf32_available

from keepsight.errors import UserError
from keepsight.models.distributed import check_builds
from keepsight.train.settings import TrainSettings


def training_arguments(settings: TrainSettings, work: Path, key: str = "train") -> TrainingArguments:
    """The Trainer's arguments for these settings; `work` takes checkpoints and logs, `key` names them in a recipe.

    Raises:
        UserError: the samples of a step do not divide into the batches of all processes, no device has the precision
            that is asked for, or see `check_builds`.
    """
    check_builds()
    if settings.tf32 and not is_torch_tf32_available():
        raise UserError(f"{key}.tf32=true needs an Nvidia GPU of the generation Ampere or later; leave it out")
    os.environ["ACCELERATE_MIXED_PRECISION"] = settings.precision  # DeepSpeed takes the launcher's, which may differ
    arguments = TrainingArguments(
        output_dir=str(work),
        max_steps=settings.steps or -1,
        num_train_epochs=settings.epochs,
        per_device_train_batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        weight_decay=0.0,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": settings.min_learning_rate},
        warmup_steps=min(settings.warmup, math.nextafter(1, 0)),  # the Trainer reads 1.0 as one step
        max_grad_norm=settings.clip,
        bf16=settings.precision == "bf16",
        fp16=settings.precision == "fp16",
        seed=settings.seed,
        eval_strategy="steps",
        eval_steps=settings.measure_every,
        eval_on_start=True,
        save_steps=settings.save_every,
        logging_steps=10,
        logging_nan_inf_filter=False,
        report_to=settings.report_to,
        tf32=settings.tf32,
        remove_unused_columns=False,
        label_names=[],
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        use_cpu=not torch.accelerator.is_available(),  # else processes on CPUs would not find one another
    )
    arguments.gradient_accumulation_steps = settings.accumulation(arguments.world_size, key)
    return arguments


def say_idle_gpus(count: int) -> None:
    """Say how a training in one process can use all `count` GPUs of its machine, if there are several."""
    if count > 1:
        print(
            f"this training uses one of {count} GPUs; to use all, begin the command with "
            f"`accelerate launch --multi_gpu --num_processes {count}` in place of `python`"
        )
