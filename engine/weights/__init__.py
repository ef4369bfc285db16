"""Weights from a GGUF file, a Hugging Face directory, or upcycled from one → config, tensors, tokenizer, revision."""

import hashlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.models.config import ATTENTION_MODULES, SCALE, ModelConfig, UnsupportedConfig, from_hf, module_sizes
from engine.weights import experts, gguf_model, quantised, safetensors, upcycle
from engine.weights.errors import CorruptAdapter, UnsupportedModel
from engine.weights.gguf import GgufFile
from engine.weights.gguf_tokenizer import card_from_gguf
from engine.weights.tokenizer import card_from_directory
from engine.wire import TokenizerCard

_HASHED_AT_ONCE = 8 << 20  # bytes
__all__ = ["CorruptAdapter", "LoadedModel", "UnsupportedModel", "load_model"]


@dataclass(frozen=True)
class LoadedModel:
    """``weights`` by Hugging Face name, each cast, or of 8 bits with its scales under its name and SCALE."""

    config: ModelConfig
    weights: dict[str, torch.Tensor]
    tokenizer: TokenizerCard
    digest: Future[str]

    @property
    def revision(self) -> str:
        """The hex SHA-256 of what the weights came from: waits for it."""
        return self.digest.result()


def load_model(
    source: str | Path, dtype: torch.dtype, device: torch.device = safetensors.CPU, *, keep_quantised: bool = False
) -> LoadedModel:
    """Reads a ``.gguf`` file, a Hugging Face directory, or ``upcycle:`` and one of these with options (upcycle.py) onto
    ``device``.

    ``keep_quantised``: weights of 8 bits that the decoder multiplies as they are stay so; otherwise, and in all other
    places, they are multiplied out to ``dtype``. Raises UnsupportedModel, which names what is at fault.
    """
    if str(source).startswith(upcycle.SCHEME):
        return _moved(_load_upcycled(str(source), dtype), device)
    path = Path(source)
    if path.is_dir():
        return _load_directory(path, dtype, device, keep_quantised)
    if path.is_file():
        return _moved(_load_gguf(path, dtype), device)
    raise UnsupportedModel(f"{path} is neither a file nor a directory")


def _load_upcycled(source: str, dtype: torch.dtype) -> LoadedModel:
    from engine.weights.mlp_inputs import mean_mlp_inputs  # needs the decoder, which needs this package

    path, recipe = upcycle.parse(source)
    dense = load_model(path, dtype)

    def mean_inputs() -> list[torch.Tensor]:
        return mean_mlp_inputs(dense.config, dense.weights, dense.tokenizer)

    config, weights = upcycle.upcycle(dense.config, dense.weights, recipe, mean_inputs)
    digest = _in_background(lambda: hashlib.sha256(f"{dense.revision} {recipe}".encode()).hexdigest())
    return LoadedModel(config, _complete(config, weights), dense.tokenizer, digest)


def _load_gguf(path: Path, dtype: torch.dtype) -> LoadedModel:
    file = GgufFile(path)
    config = _named(lambda: gguf_model.model_config(file))
    digest = _in_background(lambda: _digest_file(path).hex())
    weights = gguf_model.read_weights(file, config, dtype)
    return LoadedModel(config, _complete(config, weights), card_from_gguf(file.metadata), digest)


def _in_background(hashed: Callable[[], str]) -> Future[str]:
    """Hashing leaves the interpreter lock, and nobody needs a revision before the model stands."""
    pool = ThreadPoolExecutor(max_workers=1)
    future = pool.submit(hashed)
    pool.shutdown(wait=False)
    return future


def _moved(loaded: LoadedModel, device: torch.device) -> LoadedModel:
    return replace(loaded, weights={name: tensor.to(device) for name, tensor in loaded.weights.items()})


def _load_directory(directory: Path, dtype: torch.dtype, device: torch.device, keep_quantised: bool) -> LoadedModel:
    said = safetensors.hf_config(directory)
    layout = quantised.layout_of(said)
    config = _named(lambda: from_hf(said))
    paths = safetensors.shard_paths(directory)
    digest = _in_background(lambda: _digest_files([directory / "config.json", *paths]))
    weights = safetensors.read_weights(paths, dtype, layout, device)
    if layout is not None:
        quantised.settle(weights, layout, dtype, keep=keep_quantised)
    tokenizer = card_from_directory(directory)
    return LoadedModel(config, _complete(config, weights), tokenizer, digest)


def _named(read: Callable[[], ModelConfig]) -> ModelConfig:
    try:
        return read()
    except UnsupportedConfig as error:
        raise UnsupportedModel(str(error)) from error


def _digest_files(paths: list[Path]) -> str:
    """One hash over the names and contents, each by its own digest, so that no boundary can move."""
    whole = hashlib.sha256()
    with ThreadPoolExecutor(max_workers=8) as pool:
        for path, content in zip(paths, pool.map(_digest_file, paths), strict=True):
            whole.update(hashlib.sha256(path.name.encode()).digest() + content)
    return whole.hexdigest()


def _digest_file(path: Path) -> bytes:
    """In large parts, between which the interpreter lock is asked for; read, since a map of a file that somebody cuts
    meanwhile would end the process."""
    content, part = hashlib.sha256(), memoryview(bytearray(_HASHED_AT_ONCE))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(part):
            content.update(part[:count])
    return content.digest()


def _complete(config: ModelConfig, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights without a tied head's copy. Raises UnsupportedModel for a missing, unknown or misshapen one."""
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    experts.fuse(config, weights)
    expected = expected_shapes(config)
    scales = {name for name in weights if name.endswith(SCALE)}
    missing, unknown = expected.keys() - weights.keys(), weights.keys() - expected.keys() - scales
    if missing:
        raise UnsupportedModel(f"the model lacks {_first(missing)}")
    if unknown:
        raise UnsupportedModel(f"the decoder has no place for {_first(unknown)}")
    wrong = {name for name, shape in expected.items() if tuple(weights[name].shape) != shape}
    if wrong:
        name = min(wrong)
        raise UnsupportedModel(f"{name} has shape {tuple(weights[name].shape)}, expected {expected[name]}")
    return weights


def _first(names: set[str]) -> str:
    return min(names) + (f" and {len(names) - 1} more tensors" if len(names) > 1 else "")


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a decoder by Hugging Face name, its experts fused."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        shapes |= _layer_shapes(config, f"model.layers.{layer}") | _mlp_shapes(config, layer)
    return shapes


def _layer_shapes(config: ModelConfig, prefix: str) -> dict[str, tuple[int, ...]]:
    attention = config.attention
    biased = {"q_proj", "k_proj", "v_proj"} if attention.bias else set()
    biased |= {"o_proj"} if attention.output_bias else set()
    shapes: dict[str, tuple[int, ...]] = {}
    sizes = module_sizes(config)
    for module in ATTENTION_MODULES:
        in_size, out_size = sizes[module]
        shapes[f"{prefix}.self_attn.{module}.weight"] = (out_size, in_size)
        if module in biased:
            shapes[f"{prefix}.self_attn.{module}.bias"] = (out_size,)
    if attention.head_norms:
        shapes |= {f"{prefix}.self_attn.{part}_norm.weight": (attention.head_dim,) for part in "qk"}
    if attention.whole_norms:
        shapes |= {f"{prefix}.self_attn.{part}_norm.weight": (sizes[f"{part}_proj"][1],) for part in "qk"}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        shapes[f"{prefix}.{norm}.weight"] = (config.hidden_size,)
    return shapes


def _mlp_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    prefix = f"model.layers.{layer}.mlp"
    if config.moe is not None and layer in config.moe.layers:
        return experts.expert_shapes(config.moe, config.hidden_size, prefix)
    return experts.mlp_shapes(config.hidden_size, config.intermediate_size, prefix)
