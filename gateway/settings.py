"""What an operator can set. One table makes the command line, the TENORA_* variables and `Settings`.

This is the only module that reads the environment; standard OTEL_* variables pass through unread.
"""

import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

PREFIX = "TENORA_"
DEFAULT_MODEL = "smollm2-135m"
MOE_MODEL = "smollm2-135m-moe8"  # the default model, upcycled
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,63}")  # as long as a sealed context has room for
_MAX_SOCKET_FOLDER = 70  # bytes; Linux takes socket paths of 107
_DRIVERS = {
    **dict.fromkeys(("postgresql", "postgres", "postgresql+asyncpg"), "postgresql+asyncpg"),
    **dict.fromkeys(("sqlite", "sqlite+aiosqlite"), "sqlite+aiosqlite"),
}
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


class CannotStart(Exception):
    """Tenora can't start as it was told to; the message is one line that says what to do."""


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where a gateway finds an engine: the name of the model it serves, and its socket's path."""

    model: str
    address: str


@dataclass(frozen=True, slots=True)
class AdapterSizes:
    """Of what an engine keeps of adapters; None leaves the engine's own default."""

    adapter_slots: int | None = None
    max_adapter_rank: int | None = None
    expert_adapter_slots: int | None = None
    max_expert_adapter_rank: int | None = None
    adapter_memory: int | None = None  # bytes
    adapter_disk: int | None = None  # bytes


@dataclass(frozen=True, slots=True)
class EngineSizes(AdapterSizes):
    """Sizes handed to every engine; None leaves the engine's own default."""

    block_size: int | None = None
    kv_blocks: int | None = None
    kv_memory: int | None = None  # bytes
    context: int | None = None  # tokens
    max_step_tokens: int | None = None
    max_running: int | None = None
    threads: int | None = None
    journal_keep_days: int | None = None
    journal_keep_bytes: int | None = None
    deterministic: bool = False

    def to_args(self) -> list[str]:
        """As flags of `python -m engine`."""
        args: list[str] = []
        for name, value in asdict(self).items():
            flag = "--" + name.replace("_", "-")
            if value is True:
                args.append(flag)
            elif value not in (None, False):
                args += [flag, str(value)]
        return args


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What only the supervisor acts on. ``demo`` None: when the host is loopback and the database our own."""

    ops_host: str = "127.0.0.1"
    ops_port: int = 8001
    models: tuple[str, ...] = (DEFAULT_MODEL,)  # [NAME=]SOURCE
    model_cache: Path = field(default_factory=lambda: Path.home() / ".cache" / "tenora")
    device: str = "auto"
    dtype: str = "auto"
    gateways: int = 1
    engines_per_model: int = 1
    launcher: str = "local"
    demo: bool | None = None
    fetch: bool = True
    gpu_hour_picousd: int | None = None  # what an hour of a GPU costs the operator
    issuer: str = "Tenora"


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of one installation. Paths are absolute; ``redis_url`` '' means an embedded store."""

    home: Path
    database_url: str  # SQLAlchemy URL with an async driver
    blobs: Path
    secrets: Path
    host: str = "127.0.0.1"
    port: int = 8000
    redis_url: str = ""
    log_level: str = "info"
    drain_seconds: float = 30.0
    max_connections: int = 4096  # of each gateway
    receive_seconds: float = 30.0
    webhook_loopback: bool = False  # for tests: webhooks may call this machine, without TLS too
    engines: tuple[EngineAddress, ...] = ()
    serve: ServeOptions = field(default_factory=ServeOptions)
    sizes: EngineSizes = field(default_factory=EngineSizes)
    otel: tuple[tuple[str, str], ...] = ()

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "Settings":
        """From parsed options (see `serve_options`). Raises click.UsageError for what doesn't fit together."""
        home = Path(options["home"]).expanduser().resolve()
        return cls(
            home=home,
            database_url=async_database_url(options["database_url"]) or default_database(home),
            blobs=_path(options["blobs"], home / "blobs"),
            secrets=_path(options["secrets"], home / "secrets.json"),
            host=options["host"],
            port=options["port"],
            redis_url=_redis_url(options["redis_url"]),
            log_level=options["log_level"],
            drain_seconds=options["drain_seconds"],
            max_connections=options["max_connections"],
            receive_seconds=options["receive_seconds"],
            webhook_loopback=options["webhook_loopback"],
            engines=tuple(_engine_address(text) for text in options["engine_addresses"]),
            serve=_serve_options(options),
            sizes=EngineSizes(**{f.name: options[f.name] for f in fields(EngineSizes)}),
            otel=tuple(sorted((k, v) for k, v in os.environ.items() if k.startswith("OTEL_"))),
        )

    @classmethod
    def from_env(cls) -> "Settings":
        """From TENORA_* alone: how a child process learns its settings."""
        command = click.Command("tenora", params=list(serve_options()))
        return cls.from_options(command.make_context("tenora", []).params)

    def to_env(self) -> dict[str, str]:
        """The TENORA_* and OTEL_* variables from which `from_env` makes an equal Settings."""
        values: dict[str, Any] = {
            **{name: getattr(self, name) for name in ("home", "database_url", "blobs", "secrets", "host", "port")},
            **{name: getattr(self, name) for name in ("redis_url", "log_level", "drain_seconds")},
            **{name: getattr(self, name) for name in ("max_connections", "receive_seconds", "webhook_loopback")},
            **asdict(self.serve),
            **asdict(self.sizes),
            "engine_addresses": tuple(f"{e.model}={e.address}" for e in self.engines),
        }
        env = {_variable(name): _to_text(value) for name, value in values.items() if value not in (None, (), "")}
        return env | dict(self.otel)

    def child_environment(self) -> dict[str, str]:
        """This process's environment with our own variables replaced by `to_env`."""
        return {k: v for k, v in os.environ.items() if not k.startswith(PREFIX)} | self.to_env()

    @property
    def run_dir(self) -> Path:
        """The folder of sockets: HOME/run, or one in the temporary folder where that is too long for a socket."""
        inside = self.home / "run"
        if len(os.fsencode(inside)) <= _MAX_SOCKET_FOLDER:
            return inside
        digest = hashlib.sha256(os.fsencode(self.home)).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"tenora-{os.getuid()}-{digest}"

    def scrape_path(self, index: int) -> Path:
        """The unix socket on which gateway ``index`` gives its metric families."""
        return self.run_dir / f"gateway-{index}.scrape"

    @property
    def credentials(self) -> Path:
        return self.home / "credentials.json"

    @property
    def is_loopback(self) -> bool:
        return self.host in _LOOPBACK

    @property
    def database_is_ours(self) -> bool:
        """No --database-url was given."""
        return self.database_url == default_database(self.home)

    @property
    def wants_demo(self) -> bool:
        if self.serve.demo is not None:
            return self.serve.demo
        return self.is_loopback and self.database_is_ours

    @property
    def store_deadline_s(self) -> float:
        """How long an admission may wait for the store: 250 ms embedded, 50 ms with a URL."""
        return 0.25 if self.redis_url.startswith("unix:") or not self.redis_url else 0.05

    @property
    def url(self) -> str:
        """The public API's base address, as a client writes it."""
        return f"http://{host_in_url(self.host)}:{self.port}/v1"


def host_in_url(host: str) -> str:
    """A bind address as a client can dial it: wildcard addresses become loopback, IPv6 gets brackets."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"[{host}]" if ":" in host else host


def _redis_url(url: str) -> str:
    """Not repeated in the message: a URL may hold a password."""
    if url and url.partition("://")[0] not in ("redis", "rediss", "unix"):
        raise click.UsageError("--redis-url: give redis://, rediss:// or unix:// and where it is")
    return url


def parse_model(text: str) -> tuple[str, str]:
    """[NAME=]SOURCE → (name, source); the name defaults to the recipe, or the file's or folder's own.

    Raises click.UsageError for a name that clients could not send.
    """
    name, equals, source = text.partition("=")
    if not equals:
        source, name = text, Path(text).name.removesuffix(".gguf")
    if not source or not _MODEL_NAME.fullmatch(name):
        raise click.UsageError(
            f"--model {text}: give NAME=SOURCE with a name of at most 64 letters, digits and . _ - /"
        )
    return name, source


def serve_options() -> list[click.Option]:
    """A fresh set of click options, one for each setting, each with its TENORA_* variable."""
    return [
        _option("--host", default="127.0.0.1", help="Address of the public API."),
        _option("--port", type=_PORT, default=8000, help="Port of the public API; 0 takes a free one."),
        _option("--ops-host", default="127.0.0.1", help="Address of the ops API."),
        _option("--ops-port", type=_PORT, default=8001, help="Port of the ops API; 0 takes a free one."),
        _option("--home", default="./.tenora", help="Folder of everything that is kept."),
        _option("--model", "models", type=_LISTED, multiple=True, default=(DEFAULT_MODEL,), help=_MODEL_HELP),
        _option("--model-cache", default=str(Path.home() / ".cache" / "tenora"), help="Folder of fetched models."),
        _option("--fetch/--no-fetch", "fetch", default=True, help="Fetch a recipe's model when it is absent."),
        _option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto"),
        _option("--dtype", type=click.Choice(["auto", "float32", "bfloat16"]), default="auto"),
        _option("--gateways", type=_POSITIVE, default=1, help="Gateway processes on the one public socket."),
        _option("--engines", "engines_per_model", type=_POSITIVE, default=1, help="Engines for each model."),
        _option("--launcher", type=click.Choice(["local"]), default="local", help="What starts engines."),
        _option("--redis-url", default="", help="A Redis or Valkey to use instead of the embedded one."),
        _option("--database-url", default="", help="A database to use instead of SQLite in HOME."),
        _option("--blobs", default="", help="Folder of adapter files.  [default: HOME/blobs]"),
        _option("--secrets", default="", help="File of the installation's secrets.  [default: HOME/secrets.json]"),
        _option("--demo/--no-demo", "demo", default=None, help="Make two demo tenants at the first start."),
        _option("--issuer", default="Tenora", help="Who issues invoices: your company, as it is to stand there."),
        _option("--gpu-hour-picousd", type=_POSITIVE, help="Cost of a GPU hour in 10^-12 USD, for cost reports."),
        _option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info"),
        _option("--drain-seconds", type=click.FloatRange(0, 3600), default=30.0, help="Time to finish at SIGTERM."),
        _option("--max-connections", type=_POSITIVE, default=4096, help="Connections of a gateway at once."),
        _option("--receive-seconds", type=click.FloatRange(1, 3600), default=30.0, help=_RECEIVE_HELP),
        *_size_options(),
        _option("--webhook-loopback", is_flag=True, default=False, hidden=True, help="For tests of webhooks."),
        _option("--engine-addresses", type=_LISTED, multiple=True, hidden=True, help="Set by serve for its gateways."),
    ]


_DETERMINISTIC_HELP = (
    "Bit-equal answers on a GPU too, whoever shares the steps: each is computed as one of 256 tokens (or as many as "
    "--max-step-tokens and --max-running ask for), which is slower. A CPU's are bit-equal anyway."
)


_EXPERT_SLOTS_HELP = (
    "Slots of a GPU engine that may hold adapters on experts [0]; each takes memory for every expert. A CPU's all may."
)


def _size_options() -> list[click.Option]:
    return [
        _option("--block-size", type=_POSITIVE, help="Tokens in a KV block."),
        _option("--kv-blocks", type=_POSITIVE, help="Blocks in the KV pool."),
        _option("--kv-memory", type=_POSITIVE, help="Bytes of the KV pool, instead of --kv-blocks."),
        _option("--context", type=_POSITIVE, help="Longest sequence, in tokens."),
        _option("--max-step-tokens", type=_POSITIVE, help="Tokens computed in one step."),
        _option("--max-running", type=_POSITIVE, help="Sequences in one step."),
        _option("--adapter-slots", type=_POSITIVE, help="Adapters on the device at once."),
        _option("--max-adapter-rank", type=_POSITIVE, help="Largest LoRA rank."),
        _option("--expert-adapter-slots", type=_POSITIVE, help=_EXPERT_SLOTS_HELP),
        _option("--max-expert-adapter-rank", type=_POSITIVE, help="Largest LoRA rank on experts on a GPU [16]."),
        _option("--adapter-memory", type=_POSITIVE, help="Bytes of adapters kept in host memory by an engine [2 GiB]."),
        _option("--adapter-disk", type=_POSITIVE, help="Bytes of adapters kept on disk by an engine [8 GiB]."),
        _option("--threads", type=_POSITIVE, help="CPU threads of an engine."),
        _option("--journal-keep-days", type=_POSITIVE, help="Days that usage journals are kept for audits [90]."),
        _option("--journal-keep-bytes", type=_POSITIVE, help="Bytes of each usage journal kept at most [8 GiB]."),
        _option("--deterministic", is_flag=True, default=False, help=_DETERMINISTIC_HELP),
    ]


class _Listed(click.ParamType):
    """A text; several in one variable are separated by commas, a comma inside of one has a backslash before it."""

    name = "text"

    def split_envvar_value(self, rv: str) -> list[str]:
        return [re.sub(r"\\(.)", r"\1", item) for item in re.findall(r"(?:[^\\,]|\\.)+", rv)]


_LISTED = _Listed()
_PORT = click.IntRange(0, 65535)
_POSITIVE = click.IntRange(min=1)
_MODEL_HELP = (
    "[NAME=]SOURCE: a recipe (smollm2-135m, smollm2-135m-moe8), a .gguf file, or a Hugging Face folder. Repeatable."
)
_RECEIVE_HELP = "Time for the head of a request to come, and how long its body may stand still."
_VARIABLES = {"models": "MODEL", "engines_per_model": "ENGINES"}


def _variable(name: str) -> str:
    return PREFIX + _VARIABLES.get(name, name.upper())


def _option(*declarations: str, **attributes: Any) -> click.Option:
    named = [d for d in declarations if not d.startswith("-")]
    name = named[0] if named else declarations[0].removeprefix("--").replace("-", "_")
    show_default = attributes.get("default") not in (None, "", ())
    return click.Option(
        [*(d for d in declarations if d.startswith("-")), name],
        envvar=_variable(name),
        show_default=show_default,
        show_envvar=True,
        **attributes,
    )


def _serve_options(options: Mapping[str, Any]) -> ServeOptions:
    values = {f.name: options[f.name] for f in fields(ServeOptions)}
    values["model_cache"] = _path(values["model_cache"], Path())
    names = [parse_model(text)[0] for text in values["models"]]
    if len(set(names)) != len(names):
        raise click.UsageError("--model: two models have one name; give NAME=SOURCE")
    return ServeOptions(**values)


def _to_text(value: Any) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, tuple):
        return ",".join(re.sub(r"([\\,])", r"\\\1", item) for item in value)
    return str(value)


def _path(text: str | Path, default: Path) -> Path:
    return Path(text).expanduser().resolve() if str(text) else default


def default_database(home: Path) -> str:
    """HOME's own; what means something in a URL is escaped."""
    return f"sqlite+aiosqlite:///{quote(str(home / 'tenora.db'))}"


def async_database_url(url: str) -> str:
    """With the async driver that we use; '' stays. Raises click.UsageError, which repeats nothing: a URL may hold a
    password."""
    scheme, _, rest = url.partition("://")
    driver = _DRIVERS.get(scheme)
    if url and (driver is None or not rest):
        raise click.UsageError("--database-url: give postgresql:// or sqlite:/// and where it is")
    return f"{driver}://{rest}" if url else ""


def _engine_address(text: str) -> EngineAddress:
    model, _, address = text.partition("=")
    return EngineAddress(model, address)
