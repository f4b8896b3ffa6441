"""Configure a server as one YAML value: a model with every engine setting, and how it is offered."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from workbench.engine.config import EngineConfig
from workbench.settings import Count, Settings

Seconds = Annotated[float, Field(gt=0)]


class ServerSettings(Settings):
    """Settings of the server itself: its address, bounds and times."""

    host: str = "127.0.0.1"  # loopback alone; 0.0.0.0 listens on every address of the machine
    port: Annotated[int, Field(ge=0, le=65535)] = 8000  # 0: any free one
    max_body_bytes: Count = 4 << 20  # of a request; more is answered with 413
    max_waiting: Count = 256  # calls without a first token; more are refused with `retry-after`
    max_choices: Count = 128  # of one call: prompts times n
    max_buffered_pieces: Count = 8192  # that wait for a client who does not read; then its call is cancelled
    default_max_tokens: Count | None = None  # of a chat that does not say; None: what the context has left
    ping_seconds: Seconds = 15.0  # without an event until a stream sends a comment
    send_seconds: Seconds = 60.0  # that a client may leave what was sent unread; then its connection is cut
    header_seconds: Seconds = 10.0  # for the header of a request, from its first byte
    body_seconds: Seconds = 30.0  # for its body
    idle_seconds: Seconds = 75.0  # that a connection may say nothing between requests
    step_seconds: Seconds | None = 600.0  # of one step of the engine; then its calls fail until it ends; None: no limit
    drain_seconds: Seconds = 30.0  # that streams may go on after SIGTERM; then they end with an error
    unknown_fields: Literal["ignore", "refuse"] = "ignore"  # of a body; what is ignored is listed in a header
    metrics_open: bool = False  # /metrics is for every key of a gateway; else for those with the scope admin
    kept_traces: Count = 256  # calls whose traces can be asked for
    trace_bytes: Count = 256 << 20  # of these, about: long answers leave room for fewer
    replay_folder: str | None = None  # of requests, prompts too, and their steps, to run again; None: none is kept
    replay_bytes: Count = 256 << 20  # of these on disk, about; the oldest are deleted
    memory_bytes: Count = 64 << 20  # of prompts, to explain cache misses; and of answers, to put their tokens back
    memory_seconds: Seconds = 3600.0  # that they are remembered after their last use
    response_bytes: Count = 256 << 20  # of responses that are kept by id, about; a tenant has a quarter at most
    response_seconds: Seconds = 2_592_000.0  # that they are kept after their last use
    files_folder: str | None = None  # of uploaded files and results of batches; None: one that ends with the server
    max_files_bytes: Count = 8 << 30  # on disk: files, requests and results of batches, of all tenants
    max_tenant_files_bytes: Count = 1 << 30  # of one tenant
    max_upload_bytes: Count = 64 << 20  # of a file, and of the body of a batch of messages
    batch_calls: Count = 8  # sequences that all batches together run at once; half of the engine's at most
    batch_result_seconds: Seconds = 604_800.0  # that results are kept after the end of their batch
    num_threads: Count = 2  # that assemble and encode prompts; tenants take turns

    @property
    def refuses_unknown(self) -> bool:
        return self.unknown_fields == "refuse"


class ServeConfig(EngineConfig):
    """Everything that decides how a server answers. `models` are further ones, by the name that clients give."""

    served_name: str | None = None  # of the model; its own unless given
    models: dict[str, EngineConfig] = {}
    server: ServerSettings = ServerSettings()
    gateway: dict[str, Any] | None = None  # settings of `workbench.gateway`; None: no gateway, every caller may ask
