"""Where ``./run`` keeps the default model's file."""

import os
from pathlib import Path

_CACHE = os.environ.get("TENORA_MODEL_CACHE") or Path(__file__).resolve().parent.parent / ".models"
DEFAULT_GGUF = Path(_CACHE) / "SmolLM2-135M-Instruct.Q4_1.gguf"
