"""transformers' Mixtral of tiny_moe's weights with PEFT's LoRA on its experts: what PEFT writes and computes."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.models.config import ModelConfig
from tests.families import family_config


def _mixtral(config: ModelConfig, weights: dict[str, torch.Tensor]) -> Any:
    import transformers

    assert config.moe is not None
    known = {key: value for key, value in family_config(config).items() if key not in ("model_type", "architectures")}
    known |= {"num_local_experts": config.moe.num_experts, "num_experts_per_tok": config.moe.top_k}
    known |= {"intermediate_size": config.moe.intermediate_size}
    model = transformers.AutoModelForCausalLM.from_config(transformers.MixtralConfig(**known), dtype=torch.float32)
    model.load_state_dict(weights, strict=True)
    return model.eval()


def saved_by_peft(
    folder: Path, config: ModelConfig, weights: dict[str, torch.Tensor], targets: tuple[str, ...], rank: int, alpha: int
) -> tuple[bytes, Path, dict[tuple[int, str], np.ndarray]]:
    """A random adapter on whole parameters: config and weights as saved, and PEFT's delta of each [E, out, in]."""
    import peft

    torch.manual_seed(3)
    settings = peft.LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=[], init_lora_weights=False, task_type="CAUSAL_LM",
        target_parameters=[f"mlp.experts.{name}" for name in targets],
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(_mixtral(config, weights), settings)
        model.save_pretrained(str(folder))
    computed = {
        (int(name.split(".layers.")[1].split(".")[0]), module.parameter_name): module.get_delta_weight("default")
        for name, module in model.named_modules()
        if isinstance(module, peft.tuners.lora.layer.ParamWrapper)
    }
    deltas = {place: delta.detach().numpy() for place, delta in computed.items()}
    return (folder / "adapter_config.json").read_bytes(), folder / "adapter_model.safetensors", deltas


def saved_again_by_peft(
    folder: Path, config: ModelConfig, weights: dict[str, torch.Tensor], config_json: bytes, adapter: bytes
) -> tuple[bytes, Path]:
    """An adapter with a key for each expert, loaded by PEFT, which fuses it, and saved."""
    import peft

    given, again = folder / "given", folder / "again"
    given.mkdir(parents=True)
    (given / "adapter_config.json").write_bytes(config_json)
    (given / "adapter_model.safetensors").write_bytes(adapter)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(_mixtral(config, weights), str(given))
        model.save_pretrained(str(again))
    return (again / "adapter_config.json").read_bytes(), again / "adapter_model.safetensors"
