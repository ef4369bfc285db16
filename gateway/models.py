"""What is served: the models by name, their engines, and the text side of each."""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from engine.client import EngineClient
from engine.wire import ModelCard, Welcome
from gateway.errors import ApiError
from gateway.memory import give_back
from gateway.text.chat import ChatTemplate
from gateway.text.tokenizer import ModelTokenizer


@dataclass(frozen=True, slots=True)
class TextSide:
    """What the gateway knows of a model's weights: card, tokenizer, template (None: the model has none)."""

    card: ModelCard
    tokenizer: ModelTokenizer
    chat: ChatTemplate | None

    @property
    def fingerprint(self) -> str:
        return "fp_" + self.card.revision[:10]


@dataclass(slots=True)
class ServedModel:
    """A base model's name and its engines; the text side is kept when all of them are away."""

    name: str
    engines: list[EngineClient] = field(default_factory=list)
    _text: TextSide | None = None

    def text(self) -> TextSide:
        """Raises ApiError 503 while no engine of this model has ever been connected."""
        for engine in self.engines:
            if engine.welcome is not None:
                return self._know(engine, engine.welcome)
        if self._text is None:
            raise ApiError(f"The model `{self.name}` is starting.", code="overloaded")
        return self._text

    def connected(self) -> list[EngineClient]:
        return [engine for engine in self.engines if engine.connected]

    def _know(self, engine: EngineClient, welcome: Welcome) -> TextSide:
        if self._text is None or self._text.card.revision != welcome.card.revision:
            self._text = _text_side(welcome)
            engine.welcome = msgspec.structs.replace(welcome, tokenizer=None)  # megabytes that nobody reads again
            del welcome
            give_back()
        return self._text


class Catalog:
    """The served base models. Engines are added before the first request and stay."""

    def __init__(self) -> None:
        self.models: dict[str, ServedModel] = {}

    def add(self, name: str, engine: EngineClient) -> None:
        self.models.setdefault(name, ServedModel(name)).engines.append(engine)

    def get(self, name: str) -> ServedModel | None:
        return self.models.get(name)

    def engines(self) -> list[EngineClient]:
        """Of all models."""
        return [engine for model in self.models.values() for engine in model.engines]

    def each_engine(self, visit: Callable[[EngineClient], None]) -> None:
        for model in self.models.values():
            for engine in model.engines:
                visit(engine)


def _text_side(welcome: Welcome) -> TextSide:
    card = welcome.tokenizer
    assert card is not None, "gateways ask for the tokenizer"
    tokenizer = ModelTokenizer(card, welcome.card.vocab_size)
    chat = ChatTemplate(card.chat_template, card.tokens, tokenizer) if card.chat_template else None
    return TextSide(welcome.card, tokenizer, chat)
