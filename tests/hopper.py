"""In the place of a GPU, for what Triton asks before it compiles; nothing can be launched on it."""

from triton.backends.compiler import GPUTarget

TARGET = GPUTarget("cuda", 90, 32)


class Hopper:
    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0
