"""What a choice may say: a grammar's text → masks over the vocabulary, through llguidance.

The text is llguidance's own: a Lark grammar, or its JSON form, which holds JSON schemas. Nothing here knows what it is
for. A grammar's cost is bounded three times: fuel of the parser and the lexer while it is compiled and in every step,
states (memory) of the lexer, and the processor time of each mask.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine.errors import InvalidGrammar

MAX_MASK_NS = 5_000_000  # of processor time: what else this machine does ends no choice
MAX_REASON_CHARS = 300
# a step's fuel is some 4 ms, a lexer state 1 to 2 kB; errors don't repeat the grammar
_LIMITS = LLParserLimits(step_lexer_fuel=50_000, max_lexer_states=20_000, verbose_errors=False)


class Compiler:
    """Grammars over one model's vocabulary. ``compile`` may run in any thread; the interpreter is free meanwhile.

    ``clock`` gives ns of the calling thread's processor time. ``num_cut`` counts, by reason, the choices that their
    grammar's cost has ended.
    """

    def __init__(
        self,
        tokenizer_json: str,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        clock: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        self.num_cut: Counter[str] = Counter()
        self.num_masks = 0
        self.mask_ns = 0
        self.clock = clock
        self._card = tokenizer_json, vocab_size, eos_token_ids
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None

    def prepare(self) -> LLTokenizer:
        """The vocabulary as a trie, made once: 0.3 s for 50,000 tokens. Raises InvalidGrammar where it can't be."""
        with self._lock:
            if self._tokenizer is None:
                text, vocab_size, eos_token_ids = self._card
                try:
                    self._tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
                except Exception as error:  # the library raises nothing narrower
                    raise InvalidGrammar(f"this model's vocabulary takes no grammar: {_short(str(error))}") from None
            return self._tokenizer

    def compile(self, text: str) -> "Grammar":
        """Raises InvalidGrammar with the reason, also for a grammar that allows no first token."""
        matcher = LLMatcher(self.prepare(), text, log_level=0, limits=_LIMITS)
        first = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            raise InvalidGrammar(_short(matcher.get_error()))
        if not any(first):
            raise InvalidGrammar("it allows nothing at all")
        return Grammar(self, matcher, first)


class Grammar:
    """A compiled grammar at its beginning."""

    def __init__(self, compiler: Compiler, start: LLMatcher, first_mask: bytes) -> None:
        self._compiler = compiler
        self._start = start
        self._first_mask = first_mask

    def matcher(self) -> "Matcher":
        """A choice's own place in it."""
        return Matcher(self._compiler, self._start.deep_copy(), self._first_mask)


class Matcher:
    """Where one choice stands: ``mask`` before a token is drawn, ``advance`` with each token that it got, once.

    ``failure`` is why it can't go on ("" = it can): slow_mask or too_complex. ``ended``: nothing may follow.
    """

    def __init__(self, compiler: Compiler, inner: LLMatcher, mask: bytes) -> None:
        self.failure = ""
        self._compiler = compiler
        self._inner = inner
        self._mask = mask

    @property
    def ended(self) -> bool:
        return not self.failure and self._inner.is_stopped()

    def mask(self) -> bytes:
        """The tokens that may follow, a bit each, lowest bit first; at least one. b"" where ``failure`` is set."""
        if not self._mask and not self.failure:
            self._mask = self._compute()
        return self._mask

    def advance(self, token_id: int) -> None:
        """The token is part of the choice."""
        mask, self._mask = self._mask, b""
        assert is_allowed(mask, token_id), "a token was drawn that the grammar doesn't allow"
        if not self._inner.consume_token(token_id):
            self._fail("too_complex")

    def _compute(self) -> bytes:
        compiler = self._compiler
        begin_ns = compiler.clock()
        mask = self._inner.compute_bitmask()
        elapsed_ns = compiler.clock() - begin_ns
        compiler.num_masks += 1
        compiler.mask_ns += elapsed_ns
        if self._inner.is_error() or not any(mask):
            return self._fail("too_complex")
        return self._fail("slow_mask") if elapsed_ns > MAX_MASK_NS else mask

    def _fail(self, reason: str) -> bytes:
        self.failure = reason
        self._compiler.num_cut[reason] += 1
        return b""


def is_allowed(mask: bytes, token_id: int) -> bool:
    return token_id >> 3 < len(mask) and bool(mask[token_id >> 3] >> (token_id & 7) & 1)


def _short(message: str) -> str:
    """The library's words in one line; of many their beginning and their end, where the reason often is."""
    line = " ".join(message.split()) or "it is not a grammar"
    half = MAX_REASON_CHARS // 2
    return line if len(line) <= MAX_REASON_CHARS else f"{line[: half - 3]} … {line[-half:]}"
