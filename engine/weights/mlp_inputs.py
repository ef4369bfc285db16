"""What the MLPs of a dense model see on a page of text: from here an upcycled router takes its skew."""

import torch
from tokenizers import Tokenizer
from torch import Tensor

from engine.batch import Batch
from engine.models.attention import KVCache
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder, RmsNorm
from engine.models.lora_slots import LoraSlots
from engine.wire import TokenizerCard
from kernels.paged_attention import plan_attention

TEXT = (
    "Tokyo is the capital of Japan. The first 12 people who came to the market in the morning bought bread, apples "
    "and a little fish. To add two numbers in Python, write def add(a, b): return a + b. Rain fell all night, and "
    "nobody knew why the old clock on the wall had stopped at half past three. What would you like to know?"
)
BLOCK_SIZE = 16


class _Watched(RmsNorm):
    """A norm that keeps the mean of what it has made."""

    def __init__(self, norm: RmsNorm) -> None:
        self.weight, self.eps = norm.weight, norm.eps
        self.mean: Tensor | None = None

    def __call__(self, x: Tensor | None, residual: Tensor) -> Tensor:
        y = super().__call__(x, residual)
        self.mean = y.float().mean(0)
        return y


@torch.inference_mode()
def mean_mlp_inputs(config: ModelConfig, weights: dict[str, Tensor], card: TokenizerCard) -> list[Tensor]:
    """The mean input [H] of each layer's MLP over TEXT."""
    ids = Tokenizer.from_str(card.tokenizer_json).encode(TEXT).ids[: config.context_tokens]
    decoder = Decoder(config, weights)
    watched = [_Watched(layer.mlp_norm) for layer in decoder.layers]
    for layer, norm in zip(decoder.layers, watched, strict=True):
        layer.mlp_norm = norm
    num_blocks = -(-len(ids) // BLOCK_SIZE)
    kv = KVCache(config, num_blocks, BLOCK_SIZE, decoder.embedding)
    decoder.forward(_whole(ids, config), kv, LoraSlots(config, 0, 0, decoder.embedding))
    return [norm.mean for norm in watched if norm.mean is not None]


def _whole(ids: list[int], config: ModelConfig) -> Batch:
    """One prompt in one chunk, its blocks in order."""
    tables = torch.arange(-(-len(ids) // BLOCK_SIZE))[None]
    attention = config.attention
    return Batch(
        token_ids=torch.tensor(ids),
        positions=torch.arange(len(ids)),
        slot_mapping=torch.arange(len(ids)),
        attention=plan_attention(
            tables,
            [0, len(ids)],
            [len(ids)],
            block_size=BLOCK_SIZE,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            sliding_window=attention.sliding_window,
        ),
        lora=None,
        logits_rows=torch.tensor([], dtype=torch.int64),
    )
