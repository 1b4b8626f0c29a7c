"""Plans of training runs and of serving: memory, time, communication and cost, from arithmetic alone."""

from glasshouse.training.distributed.layout import Layout, choose_layout
from glasshouse.training.plan.hardware import GPUS, Gpu, find_gpu
from glasshouse.training.plan.memory import MemoryModel, StepMemory, activation_bytes
from glasshouse.training.plan.serving import ServingPlan, load_meta_decoder, plan_serving
from glasshouse.training.plan.speed import Traffic, step_traffic
from glasshouse.training.plan.training import MicroBatch, TrainingPlan, plan_training

__all__ = [
    "GPUS",
    "Gpu",
    "Layout",
    "MemoryModel",
    "MicroBatch",
    "ServingPlan",
    "StepMemory",
    "Traffic",
    "TrainingPlan",
    "activation_bytes",
    "choose_layout",
    "find_gpu",
    "load_meta_decoder",
    "plan_serving",
    "plan_training",
    "step_traffic",
]
