"""What an engine says of its model when a gateway connects. The other messages: wire.py."""

from msgspec import Struct


class ExpertCard(Struct, frozen=True):
    """The routed experts of a model, in ``layers``: gated MLPs of hidden_size → width → hidden_size.

    ``takes_adapters``: whether LoRA on them is computed, up to ``max_lora_rank``, 0: whatever the model's card says.
    """

    num_experts: int
    hidden_size: int
    width: int
    layers: tuple[int, ...]
    takes_adapters: bool
    max_lora_rank: int = 0


class ModelCard(Struct, frozen=True):
    """What an engine serves. ``modules`` maps each adaptable linear to its (in, out) sizes."""

    model: str
    revision: str  # hex digest of the weights' source; part of every cache namespace
    vocab_size: int
    context_tokens: int
    block_size: int
    num_blocks: int
    num_layers: int
    modules: dict[str, tuple[int, int]]
    max_lora_rank: int
    adapter_slots: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    experts: ExpertCard | None = None


class TokenizerCard(Struct, frozen=True):
    """The model's own tokenizer and chat template, so that a gateway reads no model file.

    ``tokenizer_json`` is what ``tokenizers.Tokenizer.from_str`` takes; ``tokens`` names the template's
    variables (bos_token, eos_token, …); ``add_bos`` says that plain prompts begin with bos.
    """

    tokenizer_json: str
    chat_template: str
    tokens: dict[str, str]
    add_bos: bool
