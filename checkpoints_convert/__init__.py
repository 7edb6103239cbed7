"""Hugging Face checkpoints → ours: `plan_conversion` (dry run), `convert`. One mapping table per model family.

Runs on any machine with enough disk: no accelerator, no kernels, host memory of about one layer.
"""

from checkpoints_convert.convert import Progress, convert
from checkpoints_convert.plan import ConversionPlan, plan_conversion

__all__ = ["ConversionPlan", "Progress", "convert", "plan_conversion"]
