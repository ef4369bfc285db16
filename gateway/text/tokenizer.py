"""One model's text ↔ token ids, made from the TokenizerCard that its engine sends.

Text that a caller wrote is encoded as ordinary text: no control token can come of it. Decoding is exact in bytes:
a byte-level vocabulary is read as bytes, any other through the tokenizer's own DecodeStream.
"""

import codecs
import json
import re
from array import array
from itertools import accumulate
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from engine.wire import TokenizerCard
from gateway.memory import give_back
from gateway.text.tokenizer_file import load_tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LONG_CHARS = 65_536  # an encoding takes some 100 bytes a character while it is made
_MAX_PENDING = 8  # ids without text after which a DecodeStream starts anew: longer is no character, and quadratic


class TextDecoder(Protocol):
    """Token ids of one text, in order, as text. Joined, the pieces are the decoding of all ids at once."""

    def feed(self, token_id: int) -> str:
        """The text that is certain now; '' while a character is incomplete."""
        ...

    def finish(self) -> str:
        """What a cut-off last character decodes to ('' or U+FFFD)."""
        ...


class ModelTokenizer:
    """Encodes and decodes for one model. Not changed after construction; encode may run in any thread.

    ``control`` maps the text of each control token (special in the tokenizer's own words) to its id;
    ``markers`` are the other added tokens (such as ``<think>``), which users may write.
    """

    def __init__(self, card: TokenizerCard, vocab_size: int) -> None:
        self._tokenizer = load_tokenizer(card.tokenizer_json)
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self.vocab_size = vocab_size
        self.control = {token.content: i for i, token in added.items() if token.special}
        self.markers = frozenset(token.content for token in added.values() if not token.special)
        self._control_ids = frozenset(self.control.values())
        bos = self._tokenizer.token_to_id(card.tokens.get("bos_token", ""))
        self._bos = [bos] if card.add_bos and bos is not None else []
        self._byte_level = _is_byte_level(self._tokenizer)
        tokens = self._read_bytes()
        self._table = ByteTable(tokens)
        self._word = next((i for i, data in enumerate(tokens) if len(data) > 1 and data.isalpha()), None)
        self.max_token_bytes = self._table.longest

    def to_json(self) -> str:
        """What it was made from, for another process. Some tenths of a second; may run in any thread."""
        return self._tokenizer.to_str()

    def encode(self, text: str) -> list[int]:
        """Ordinary text → ids, nothing added."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if len(text) > _LONG_CHARS:
            give_back()
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """A plain prompt → ids, with bos where the model's prompts begin with it."""
        return self._bos + self.encode(text)

    def is_control(self, token_id: int) -> bool:
        return token_id in self._control_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text; b'' for control tokens and unused ids."""
        return self._table[token_id]

    def token_name(self, token_id: int) -> str:
        """A token as log-probabilities name it: its text, ``bytes:\\x..`` for a piece of a character."""
        if token_id in self._control_ids:
            return self._tokenizer.id_to_token(token_id) or ""
        data = self._table[token_id]
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def decoder(self) -> TextDecoder:
        """A fresh decoder for one text."""
        return ByteDecoder(self._table) if self._byte_level else StreamDecoder(self._tokenizer, self._word)

    def decode(self, ids: list[int]) -> str:
        """All ids at once, control tokens left out."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _read_bytes(self) -> list[bytes]:
        """The bytes of every id."""
        alphabet = _byte_alphabet()
        table = [b""] * self.vocab_size
        for token, token_id in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if token_id in self._control_ids or token_id >= self.vocab_size:
                continue
            if not self._byte_level:
                table[token_id] = _piece_bytes(token)
            elif all(char in alphabet for char in token):
                table[token_id] = bytes(alphabet[char] for char in token)
            else:  # an added token outside the alphabet stands for itself, as the tokenizer's own decoder has it
                table[token_id] = token.encode()
        return table


class ByteTable:
    """Token id → bytes, end to end in one string: a bytes object for each of 50,000 tokens takes 3 MB."""

    def __init__(self, entries: list[bytes]) -> None:
        self._joined = b"".join(entries)
        self._ends = array("I", accumulate(map(len, entries)))
        self.longest = max(map(len, entries), default=0) or 1

    def __getitem__(self, token_id: int) -> bytes:
        start = self._ends[token_id - 1] if token_id else 0
        return self._joined[start : self._ends[token_id]]


class ByteDecoder:
    """Byte-level vocabulary: bytes through an incremental UTF-8 decoder. O(1) a token."""

    def __init__(self, table: ByteTable) -> None:
        self._table = table
        self._utf8 = _Utf8Decoder("replace")

    def feed(self, token_id: int) -> str:
        return self._utf8.decode(self._table[token_id])

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class StreamDecoder:
    """Any other vocabulary: the tokenizer's DecodeStream, started anew when it can't go on.

    ``word`` is an id with letters only: a new stream begins behind it, since decoders may drop the blank that a text
    begins with.
    """

    def __init__(self, tokenizer: Tokenizer, word: int | None) -> None:
        self._tokenizer = tokenizer
        self._before = [] if word is None else [word]
        self._stream = DecodeStream(skip_special_tokens=True)
        self._pending: list[int] = []

    def feed(self, token_id: int) -> str:
        self._pending.append(token_id)
        try:
            piece = self._stream.step(self._tokenizer, token_id)
        except Exception:  # "invalid prefix": the tokenizers library raises nothing narrower
            return self._restart()
        if piece is None:
            return self._restart() if len(self._pending) > _MAX_PENDING else ""
        self._pending.clear()
        return piece

    def finish(self) -> str:
        return self._restart() if self._pending else ""

    def _restart(self) -> str:
        text = self._tokenizer.decode(self._pending, skip_special_tokens=True)
        self._stream = DecodeStream(self._before, skip_special_tokens=True)
        self._pending.clear()
        return text


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    if tokenizer.decoder is None:
        return False
    decoder = json.loads(tokenizer.decoder.__getstate__())  # its JSON; the library shows no other way in
    return decoder.get("type") == "ByteLevel" or [d.get("type") for d in decoder.get("decoders", ())] == ["ByteLevel"]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's bytes_to_unicode turned round: printable Latin-1 as itself, the rest from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


def _piece_bytes(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()
