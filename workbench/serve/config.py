"""Configure a server as one YAML value: a model with every engine setting, and the settings of its service."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from workbench.engine.config import EngineConfig
from workbench.settings import Count, Settings

Seconds = Annotated[float, Field(gt=0)]


class ServerSettings(Settings):
    """Settings of the server itself: its address, bounds and times."""

    host: str = "127.0.0.1"  # loopback only; 0.0.0.0 listens on every address of the machine
    port: Annotated[int, Field(ge=0, le=65535)] = 8000  # 0: any free port
    max_body_bytes: Count = 4 << 20  # maximum bytes of a request; larger ones get status 413
    max_waiting: Count = 256  # maximum calls without a first token; others are refused with `retry-after`
    max_choices: Count = 128  # maximum answers of a call: prompts times n
    max_buffered_pieces: Count = 8192  # maximum pieces that wait for a slow client; then its call is cancelled
    default_max_tokens: Count | None = None  # for a chat without max_tokens; None: all that fit
    ping_seconds: Seconds = 15.0  # after this silence a stream sends a comment, which keeps the connection open
    send_seconds: Seconds = 60.0  # time limit for a client to read sent bytes; then its connection is cut
    header_seconds: Seconds = 10.0  # time limit for a request's header, from its first byte
    body_seconds: Seconds = 30.0  # time limit for a request's body
    idle_seconds: Seconds = 75.0  # maximum silence between requests of a connection
    step_seconds: Seconds | None = 600.0  # time limit of a step; then calls fail until it ends; None: no limit
    drain_seconds: Seconds = 30.0  # time limit for streams after SIGTERM; then they end with an error
    unknown_fields: Literal["ignore", "refuse"] = "ignore"  # unknown fields of a body; a header lists ignored ones
    metrics_open: bool = False  # open /metrics to every key of a gateway; False: scope admin only
    kept_traces: Count = 256  # number of calls, the latest, whose traces are kept
    trace_bytes: Count = 256 << 20  # approximate limit of all traces: fewer fit with long answers
    replay_folder: str | None = None  # folder of requests (with prompts) and steps for replays; None: not stored
    replay_bytes: Count = 256 << 20  # approximate limit of replay_folder; its oldest files are deleted
    memory_bytes: Count = 64 << 20  # limit of prompts kept to explain cache misses; as much for answers' tokens
    memory_seconds: Seconds = 3600.0  # time for which prompts and answers stay in memory after their last use
    response_bytes: Count = 256 << 20  # approximate limit of stored responses; a tenant has at most a quarter
    response_seconds: Seconds = 2_592_000.0  # time for which a stored response is kept after its last use
    files_folder: str | None = None  # folder of uploads and batch results; None: a temporary folder
    max_files_bytes: Count = 8 << 30  # maximum of all tenants' files, batch requests and results on disk
    max_tenant_files_bytes: Count = 1 << 30  # maximum of one tenant's files, batch requests and results
    max_upload_bytes: Count = 64 << 20  # maximum bytes of a file, and of a message batch's body
    batch_calls: Count = 8  # maximum running sequences of all batches; at most half of the engine's
    batch_result_seconds: Seconds = 604_800.0  # time for which results are kept after the end of their batch
    num_threads: Count = 2  # threads that assemble and encode prompts; tenants take turns

    @property
    def refuses_unknown(self) -> bool:
        return self.unknown_fields == "refuse"


class ServeConfig(EngineConfig):
    """All settings that affect a server's answers. `models` are further models, by the name that clients give."""

    served_name: str | None = None  # name of the model; None: its own name
    models: dict[str, EngineConfig] = {}
    server: ServerSettings = ServerSettings()
    gateway: dict[str, Any] | None = None  # settings of `workbench.gateway`; None: no gateway, every caller may ask
