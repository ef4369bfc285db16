"""What can be wrong with files of weights."""


class UnsupportedModel(Exception):
    """The model can't be served as it is; the message names the file, tensor, field or type at fault."""


class CorruptAdapter(Exception):
    """The bytes of a canonical adapter file aren't what their hash or their format says."""
