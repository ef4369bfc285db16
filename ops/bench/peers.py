"""Others' figures, each of its own day: out tok/s of 256 × (512 + 128), ms per token at 32 sequences, by adapters."""

# vLLM 0.22.1 on an H200, its best setting
VLLM = {
    "llama8b": {0: (6825, 5.35), 8: (5138, 9.52), 64: (2834, 19.41)},
    "qwen30b": {0: (6852, 15.95), 8: (5580, 18.63)},
    "qwen06b": {0: (18927, 3.17), 8: (11910, 4.45), 64: (8922, 8.06)},
}
