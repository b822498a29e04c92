"""Low-precision dtypes."""

from __future__ import annotations

import torch

HALF = [torch.bfloat16, torch.float16]
